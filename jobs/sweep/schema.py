"""The keys of a sweep file, with their types and defaults, as pydantic models.

`jobs.sweep.load` reads files into these models. docs/sweep_files.md explains the keys.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer

from jobs.errors import nearest
from jobs.published.figures import Published

Scalar = bool | int | float | str | None
Reference = Annotated[str, Field(pattern=r"^\$[A-Za-z_][A-Za-z0-9_]*$")]  # $PARAMETER
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=365 * 86400)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
# A type of GPU as in Slurm's Gres, such as h100 in gpu:h100:8. ASCII, because it is an option.
GPU_TYPE = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
AXES = ("fixed", "grid", "zip")  # the sections that set parameters
# Names of the values that a table can show. `jobs.frame.metrics` computes the values.
FACT = "fact."  # prefix for a fact, which is a result that the benchmark returned
PREDICTED = "predicted."  # prefix for a value that the benchmark's function `predict` returns
NAMED = (FACT, PREDICTED)
VALUES = (
    "time", "tflops", "bandwidth", "bus_bandwidth", "mfu", "tokens_per_second", "peak_memory",
    "compiling_seconds",
)  # fmt: skip
TIME_UNITS = ("us", "ms", "s")
BYTE_UNITS = ("MB", "MiB", "GB", "GiB")
STATISTICS = ("median", "mean", "min", "max", "std", "p10", "p90", "mean_std")
PSEUDO = (
    "phase",
    "device",
    "repeat",
    "value",
)  # can be used like parameters in rows and columns of a table
# Names of values of a record. They can be used like parameters in rows, columns and `where`. If a
# benchmark has a parameter with such a name, the name stands for the parameter.
RECORDED = ("commit", "host", "gpu")
FILTERS = ("device", *RECORDED)  # allowed in `where`, in addition to the parameters


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Resources(_Strict):
    """Resources of a job. The keys have the same names as in submitit.

    A value may be `$NAME`, where NAME is a parameter of the benchmark. Each run then uses its own
    value of this parameter.
    """

    nodes: Positive | Reference = 1
    tasks_per_node: Literal[1] = 1  # one worker per node, which starts the processes
    gpus_per_node: Count | Reference = 0
    # Ignored without GPUs, because a cluster file sets it for all sweeps.
    gpu_type: Annotated[str, Field(pattern=GPU_TYPE)] | Reference | None = None
    cpus_per_task: Positive | Reference | None = None
    mem_gb: Annotated[float, Field(gt=0)] | Reference | None = None
    timeout_min: Positive | Reference | None = None  # default: computed from timeout_s
    exclusive: bool = False  # whether no other job runs on the nodes at the same time


class Launch(_Strict):
    """Launch settings of a run.

    `nproc_per_node` is the number of processes that torchrun starts on each node. If it is None,
    the run is one process, started without torchrun.
    """

    nproc_per_node: Positive | Reference | None = None


class Slurm(_Strict):
    """Slurm settings of a cluster. They belong in cluster.yaml, not in a shared sweep file."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    array_parallelism: Positive = 256
    setup: list[str] = []
    srun_args: list[str] = []
    # Shell code that starts Python in the job. Default: the interpreter that submits.
    python: Annotated[str, Field(pattern=r"^\S[^\n\r]*$")] | None = None
    additional_parameters: dict[str, Scalar] = {}


class Shuffle(_Strict):
    shuffle: int  # the seed


class Sustained(_Strict):
    """Runs whose speed over seconds is measured in each round.

    A GPU can be faster for a tenth of a second than it is for seconds, because of its power limit.
    """

    seconds: Annotated[float, Field(gt=0, le=60)]  # duration of the measurement of each phase
    where: str | None = None  # condition on the parameters; None: all runs


class Blocks(_Strict):
    """How runs are paired that are compared with each other, see `jobs.block`.

    Runs that differ only in the parameters in `interleave` form a block. With the option --against,
    a block is a run with two checkouts of the code, and `interleave` and `baseline` are not used.
    """

    interleave: list[str] = []  # names of the compared parameters
    baseline: dict[str, Scalar] = {}  # values of these parameters in the baseline
    # How often each run is executed. auto: until all its cells are decided, at least 3 times.
    rounds: Annotated[int, Field(ge=1, le=1000)] | Literal["auto"] = 5
    max_rounds: Annotated[int, Field(ge=3, le=1000)] = 10  # with `rounds: auto`
    phases: list[str] = []  # that must be decided; empty: all but sustained ones
    aa: bool = True  # whether the baseline is executed twice in each round
    # Relative difference up to which two times count as the same. None: 0.01.
    margin: Annotated[float, Field(gt=0, lt=1)] | None = None
    sustained: Sustained | None = None

    @property
    def is_auto(self) -> bool:
        """Whether workers choose the number of rounds, see `jobs.verdicts.decided`."""
        return self.rounds == "auto"

    @property
    def most_rounds(self) -> int:
        return self.max_rounds if isinstance(self.rounds, str) else self.rounds


class Axes(_Strict):
    """The keys `fixed`, `grid` and `zip`, which give the parameters of the runs.

    `fixed` has one value per parameter. `grid` has a list of values per parameter, and the runs
    have all combinations of these values. `zip` has lists of equal length: the first values form
    one combination, the second values form the next one, and so on.
    """

    fixed: dict[str, Scalar] = {}
    grid: dict[str, Annotated[list[Scalar], Field(min_length=1)]] = {}
    zip: dict[str, Annotated[list[Scalar], Field(min_length=1)]] = {}


class Case(Axes):
    """An entry of the key `cases` of a sweep file. A case describes a part of the sweep's runs.

    A case inherits the parameters and settings at the top level of the file. If the case sets one
    of them, the value in the case is used.
    """

    benchmark: str | None = None  # default: the sweep's benchmark
    resources: Resources = Resources()
    launch: Launch = Launch()
    timeout_s: Seconds | None = None

    @field_serializer("resources", "launch")
    def _as_given(self, value: Resources | Launch) -> dict[str, Any]:
        """Return only the keys of `resources` or `launch` that the case sets.

        This mapping is stored in the manifest. A case that is read from the manifest therefore
        inherits all other keys from the top level.
        """
        return value.model_dump(exclude_unset=True)


# A suffix of a fact's name gives the unit of the fact. In a dotted name, any part may have the
# suffix: host_ms.forward is in milliseconds.
SUFFIXES = {"_ms": "ms", "_seconds": "s", "_bytes": "bytes"}


def measured_in(value: str) -> str:
    """Return the unit that the name of a value contains: "ms", "s", "bytes" or an empty string.

    For example, `fact.host_ms.forward` is in milliseconds. The suffixes that give a unit are `_ms`,
    `_seconds` and `_bytes`. They may be at the end of each part of a dotted name.
    """
    for part in reversed(value.split(".")):
        for suffix, unit in SUFFIXES.items():
            if part.endswith(suffix):
                return unit
    return ""


def units_of_measure(unit: str) -> tuple[str, ...]:
    """Return the units in which a table can show a quantity that was measured in `unit`.

    For example, a time in "ms" can be shown in "us", "ms" and "s". The result is empty if the unit
    cannot be converted.
    """
    if unit in ("ms", "s"):
        return TIME_UNITS
    return BYTE_UNITS if unit == "bytes" else ()


def units_of(value: str) -> tuple[str, ...]:
    """Return the units in which a table can show a value.

    Args:
        value: name of the value, such as `time` or `fact.host_ms`.

    Returns:
        Names of units, such as "ms" and "s". Empty if the value cannot be converted to other units.
    """
    if value.startswith(NAMED):
        return units_of_measure(measured_in(value))
    return {"time": TIME_UNITS, "peak_memory": BYTE_UNITS}.get(value, ())


def unknown_value(name: str) -> str | None:
    """Return an error message if tables cannot show a value of this name, else None.

    Valid names are those in VALUES, such as `time`, and names that start with `fact.` or
    `predicted.`.
    """
    if name in VALUES or (name.startswith(NAMED) and name not in NAMED):
        return None
    hint = nearest(name, [*VALUES, *(f"{prefix}<name>" for prefix in NAMED)])
    return f"{name!r} is not known{hint}"


def names_in_title(title: str) -> list[str]:
    """Return the names in braces in the title of a table or plot, such as `batch_size`."""
    return list(dict.fromkeys(re.findall(r"\{(.*?)\}", title)))


class _View(_Strict):
    """The keys of a sweep file that tables and plots have in common."""

    name: Name
    benchmark: str | None = None  # benchmark whose runs are shown; default: the sweep's
    title: str | None = None  # see `names_in_title`
    phase: str | list[str] | None = None  # default: all phases that were measured
    statistic: Literal[STATISTICS] = "median"  # type: ignore[valid-type]
    # Values that cannot be converted to this unit keep their default unit.
    unit: Literal[*TIME_UNITS, *BYTE_UNITS] | None = None  # type: ignore[valid-type]
    direction: Literal["lower", "higher"] | None = (
        None  # which values are better; default: depends on the value
    )
    where: str | None = None


class Table(_View):
    """A table that shows results of runs.

    If the key `list` is set, the table shows a list that the benchmark returned. Each item of the
    list then has one row.
    """

    value: str | Annotated[list[str], Field(min_length=1)] = "time"
    rows: list[str] = []
    columns: list[str] = []
    baseline: dict[str, Scalar] | None = None  # speedups are relative to this column
    # Name of a fact that is a list. The key in the file is `list`. The field has another name,
    # because `list` is a builtin.
    list_fact: Annotated[str, Field(pattern=r"^[^.]+(\.[^.]+)*$")] | None = Field(
        None, alias="list"
    )
    limit: Positive | None = None  # maximum number of rows per run, with `list`
    published: list[Published] = []


class Plot(_View):
    value: str = "time"
    x: str
    series: list[str] = []
    facet: list[str] = []


class Sweep(Axes):
    """The content of a sweep file, merged with its base file, a cluster file and the overrides.

    A sweep file names its base file in the key `base`. The module `load` merges the files.
    """

    name: Name
    description: str = ""
    benchmark: str
    cases: list[Case] = []
    exclude: list[dict[str, Scalar | list[Scalar]] | str] = []
    repeats: Positive = 1
    blocks: Blocks | None = None
    order: Literal["as_written"] | Shuffle = "as_written"
    resources: Resources = Resources()
    slurm: Slurm = Slurm()
    launch: Launch = Launch()
    runs_per_job: Positive | None = None  # None: jobs.launch.packing chooses it
    timeout_s: Seconds = 600.0
    tables: list[Table] = []
    plots: list[Plot] = []
    filter: str | None = None  # the value of --where

    def parameters(self) -> list[str]:
        """Return the names of the parameters that the sweep sets. All others have defaults."""
        axes = (axis for of in (self, *self.cases) for axis in (of.fixed, of.grid, of.zip))
        return list(dict.fromkeys(name for axis in axes for name in axis))
