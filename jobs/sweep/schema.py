"""The keys of a sweep file (docs/sweep_files.md), with types and checks, as pydantic models.

A check that needs the benchmarks is left out if the validation has no `Context`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ModelWrapValidatorHandler,
    ValidationInfo,
    field_serializer,
    model_validator,
)

from jobs.errors import nearest
from jobs.sweep.benchmarks import Benchmark, Benchmarks
from jobs.sweep.conditions import ConditionError
from jobs.sweep.context import STRICT, Context, Name, Positive, Scalar, condition_of
from jobs.sweep.messages import Faults, checked, fault, raise_faults
from jobs.sweep.resources import Launch, Resources, Slurm
from jobs.sweep.strict_yaml import entries
from jobs.sweep.views import Plot, Table

Info = ValidationInfo[Context | None]
AXES = ("fixed", "grid", "zip")  # the sections that set parameters


def _condition_faults(given: Any, benchmarks: Benchmarks, *path: str) -> Faults:
    try:
        condition_of(given, benchmarks)
    except ConditionError as error:
        yield fault(str(error), *path)


def _exclusion(given: Any, info: Info) -> Any:
    if not given:
        raise_faults([fault("exclude: an empty entry would exclude every run; remove it")])
    if info.context is not None:
        raise_faults(_condition_faults(given, info.context.benchmarks))
    return given


Seconds = Annotated[float, Field(gt=0, le=365 * 86400)]
Exclusion = Annotated[dict[str, Scalar | list[Scalar]] | str, AfterValidator(_exclusion)]
_Using = list[Benchmark]


class _Strict(BaseModel):
    model_config = STRICT


class Shuffle(_Strict):
    shuffle: int  # the seed


class Sustained(_Strict):
    """Runs whose speed over seconds, at the power limit of the GPU, is measured in each round."""

    seconds: Annotated[float, Field(gt=0, le=60)]  # duration of the measurement of each phase
    where: str | None = None  # condition on the parameters; None: all runs


class Blocks(_Strict):
    """How runs are paired that are compared with each other, see `jobs.block`.

    Runs that differ only in the parameters in `interleave` form a block. With the option --against,
    a block is a run with two checkouts of the code, and `interleave` and `baseline` are not used.
    """

    interleave: list[str] = Field([], examples=["[implementation]"])
    baseline: dict[str, Scalar] = Field({}, examples=["{implementation: naive}"])
    # How often each run is executed. auto: until all its cells are decided, at least 3 times.
    rounds: Annotated[int, Field(ge=1, le=1000)] | Literal["auto"] = 5
    max_rounds: Annotated[int, Field(ge=3, le=1000)] = 10  # with `rounds: auto`
    phases: list[str] = []  # that must be decided; empty: all but sustained ones
    aa: bool = True  # whether the baseline is executed twice in each round
    # Relative difference up to which two times count as the same. None: 0.01.
    margin: Annotated[float, Field(gt=0, lt=1)] | None = Field(None, examples=["0.01 for 1%"])
    sustained: Sustained | None = None

    @property
    def is_auto(self) -> bool:
        """Whether workers choose the number of rounds, see `jobs.verdicts.decided`."""
        return self.rounds == "auto"

    @property
    def most_rounds(self) -> int:
        return self.max_rounds if isinstance(self.rounds, str) else self.rounds

    @model_validator(mode="after")
    def _check(self, info: Info) -> Self:
        if info.context is not None and (self.interleave or self.baseline):
            raise_faults(self._faults(info.context.benchmarks))
        return self

    def _faults(self, benchmarks: Benchmarks) -> Faults:
        fields = benchmarks.fields
        for key in ("interleave", "baseline"):
            if not getattr(self, key):
                yield fault(f"blocks.{key} is required")
        for i, name in enumerate(self.interleave):
            if name not in fields:
                what = f"blocks.interleave must name parameters, got {name!r}"
                yield fault(what + nearest(name, fields), "interleave", i)
            elif name in self.interleave[:i]:
                yield fault(f"blocks.interleave: {name!r} is listed twice", "interleave", i)
        for name in self.baseline if set(self.interleave) <= set(fields) else ():
            if name not in self.interleave:
                what = "blocks.baseline must set parameters that blocks.interleave lists"
                hint = nearest(name, self.interleave)
                yield fault(f"{what}, got {name!r}{hint}", "baseline", name)
        if self.rounds == 1 and self.margin is not None:
            yield fault("blocks.margin requires at least 2 rounds, got rounds: 1", "margin")
        if self.sustained is not None and self.sustained.where is not None:
            yield from _condition_faults(self.sustained.where, benchmarks, "sustained", "where")


Values = Annotated[list[Scalar], Field(min_length=1)]


class _Scope(_Strict):
    """What a case, or the top level of the file, says about its runs."""

    benchmark: str | None = None
    fixed: dict[str, Scalar] = {}  # one value per parameter
    grid: dict[str, Values] = {}  # the runs have all combinations of these values
    zip: dict[str, Values] = {}  # lists of equal length; values at one index form a combination
    resources: Resources = Resources()
    launch: Launch = Launch()

    @classmethod
    def _using(cls, given: dict[str, Any], context: Context, key: str, *sections: str) -> _Using:
        """Return the benchmarks that use the value of a key in one of the sections."""
        return [context.of(given.get("benchmark"))]

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, given: Any, handler: ModelWrapValidatorHandler[Self], info: Info) -> Self:
        """Check names and values, also in sections with values of wrong types."""
        if info.context is None or not isinstance(given, dict):
            return handler(given)
        return cast(Self, checked(handler, given, cls._faults(given, info.context)))

    @classmethod
    def _faults(cls, given: dict[str, Any], context: Context) -> Faults:
        seen: dict[str, str] = {}
        lengths: dict[str, int] = {}
        for axis, name, value in _items(given, AXES):
            using = [b for b in cls._using(given, context, name, *AXES) if name in b.fields]
            if not using and cls is Sweep:  # no case uses the value; check it anyway
                using = [b for b in context.used() if name in b.fields][:1]
            if not using:
                all_of = cls._using(given, context, "")
                names = " and ".join(repr(benchmark.name) for benchmark in all_of)
                has = f"benchmark {names} has" if len(all_of) == 1 else f"benchmarks {names} have"
                fields = dict.fromkeys(field for benchmark in all_of for field in benchmark.fields)
                what = f"{has} no parameter {name!r}{nearest(name, list(fields))}"
                yield fault(what, axis, name, at_key=True)
                continue
            if name in seen:
                what = f"{name!r} is set in both {seen[name]} and {axis}; keep one"
                yield fault(what, axis, name, at_key=True)
            seen[name] = axis
            if axis != "fixed" and not isinstance(value, list):
                continue  # of the wrong type
            if axis == "zip":
                lengths[name] = len(value)
            # The index of a single value is ignored.
            for i, one in enumerate([value] if axis == "fixed" else value):
                for benchmark in using if not isinstance(one, (list, dict)) else ():
                    wrong = benchmark.wrong_value(name, one)
                    of = f" (benchmark {benchmark.name!r})" if len(context.benchmarks) > 1 else ""
                    if wrong:
                        yield fault(wrong + of, axis, name, i)
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{length} for {name!r}" for name, length in lengths.items())
            what = f"zip: all lists must have the same length, got {listed}"
            yield fault(what, "zip", at_key=True)
        for section, key, value in _items(given, ("resources", "launch")):
            name = value[1:] if isinstance(value, str) and value.startswith("$") else ""
            for benchmark in cls._using(given, context, key, section):
                if name.isidentifier() and name not in benchmark.fields:
                    what = f"{key}: {value!r} does not name a parameter"
                    if len(context.benchmarks) > 1:
                        what += f" of benchmark {benchmark.name!r}"
                    yield fault(what + nearest(name, benchmark.fields), section, key)


def _items(given: dict[str, Any], sections: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
    """Yield the section, key and value of each item of the sections that are mappings."""
    for section in sections:
        items = given.get(section)
        for key, value in items.items() if isinstance(items, dict) else ():
            yield section, key, value


class Case(_Scope):
    """A part of the sweep's runs, which inherits what it does not set from the top level."""

    timeout_s: Seconds | None = None

    @field_serializer("resources", "launch")
    def _as_given(self, value: Resources | Launch) -> dict[str, Any]:
        """Return only the keys that the case sets, so that it inherits all others in a manifest."""
        return value.model_dump(exclude_unset=True)


class Sweep(_Scope):
    """The content of a sweep file, merged with its base file, a cluster file and the overrides."""

    name: Name
    description: str = ""
    benchmark: str
    cases: list[Case] = []
    exclude: list[Exclusion] = []
    repeats: Positive = 1
    blocks: Blocks | None = None
    order: Literal["as_written"] | Shuffle = "as_written"
    slurm: Slurm = Slurm()
    runs_per_job: Positive | None = None  # None: jobs.launch.packing chooses it
    timeout_s: Seconds = 600.0
    tables: list[Table] = []
    plots: list[Plot] = []
    filter: str | None = None  # the value of --where

    @classmethod
    def _using(cls, given: dict[str, Any], context: Context, key: str, *sections: str) -> _Using:
        return context.inheriting(key, sections)

    @classmethod
    def _faults(cls, given: dict[str, Any], context: Context) -> Faults:
        yield from super()._faults(given, context)
        blocks, repeats = given.get("blocks"), given.get("repeats")
        paired = isinstance(blocks, dict) and (blocks.get("interleave") or blocks.get("baseline"))
        if paired and type(repeats) is int and repeats > 1:
            what = "repeats must be 1 together with blocks; set blocks.rounds instead"
            yield fault(f"{what}, got {repeats}", "repeats")
        for key in ("tables", "plots"):
            names: set[str] = set()
            for i, view in entries(given.get(key)):
                name = view.get("name")
                if isinstance(name, str) and name in names:
                    what = f"{key}: the name {name!r} is used twice; names must be unique"
                    yield fault(what, key, i, "name")
                names.add(str(name))
        if isinstance(given.get("filter"), str):
            yield from _condition_faults(given["filter"], context.benchmarks, "filter")

    def parameters(self) -> list[str]:
        """Return the names of the parameters that the sweep sets. All others have defaults."""
        axes = (axis for of in (self, *self.cases) for axis in (of.fixed, of.grid, of.zip))
        return list(dict.fromkeys(name for axis in axes for name in axis))
