"""The keys of a sweep file (docs/sweep_files.md) with their types, as pydantic models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_serializer

from jobs.block import Block
from jobs.sweep.resources import Launch, Resources, Slurm
from jobs.sweep.value_types import STRICT, Name, Positive, Scalar
from jobs.sweep.views import Plot, Table

AXES = ("fixed", "grid", "zip")  # the sections that set parameters


Seconds = Annotated[float, Field(gt=0, le=365 * 86400)]
Exclusion = dict[str, Scalar | list[Scalar]] | str


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
    def most_rounds(self) -> int:
        return self.max_rounds if isinstance(self.rounds, str) else self.rounds

    def block(self, id: str, runs: tuple[str, ...], sustained: tuple[str, ...] = ()) -> Block:
        """Return the block of some runs, of which the first is the baseline."""
        return Block(
            id=id,
            baseline=runs[0],
            runs=runs,
            rounds=self.most_rounds,
            aa=self.aa,
            sustained=sustained,
            auto=self.rounds == "auto",
            trial=self.most_rounds > 1,
        )


Values = Annotated[list[Scalar], Field(min_length=1)]


class _Scope(_Strict):
    """What a case, or the top level of the file, says about its runs."""

    benchmark: str | None = None
    fixed: dict[str, Scalar] = {}  # one value per parameter
    grid: dict[str, Values] = {}  # the runs have all combinations of these values
    zip: dict[str, Values] = {}  # lists of equal length; values at one index form a combination
    resources: Resources = Resources()
    launch: Launch = Launch()


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

    def parameters(self) -> list[str]:
        """Return the names of the parameters that the sweep sets. All others have defaults."""
        axes = (axis for of in (self, *self.cases) for axis in (of.fixed, of.grid, of.zip))
        return list(dict.fromkeys(name for axis in axes for name in axis))
