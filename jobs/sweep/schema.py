"""The keys of a sweep file, with their types and defaults, as pydantic models.

`jobs.sweep.load` reads files into these models. docs/sweep_files.md explains the keys.
"""

from __future__ import annotations

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
AXES = ("fixed", "grid", "zip")  # the sections that set parameters
# What a table can show. `jobs.report.metrics` computes these values from records.
FACT = "fact."  # prefix of a fact's name
PREDICTED = "predicted."  # prefix of a name that the benchmark's `predict` returns
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


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Resources(_Strict):
    """Resources of a job, by submitit's names. A value may be `$PARAMETER`."""

    nodes: Positive | Reference = 1
    tasks_per_node: Literal[1] = 1  # one worker per node; it starts the processes
    gpus_per_node: Count | Reference = 0
    cpus_per_task: Positive | Reference | None = None
    mem_gb: Annotated[float, Field(gt=0)] | Reference | None = None
    timeout_min: Positive | Reference | None = None  # default: from timeout_s and runs_per_job


class Launch(_Strict):
    """Number of processes per node that torchrun starts. None: one process, without torchrun."""

    nproc_per_node: Positive | Reference | None = None


class Slurm(_Strict):
    """Settings of a cluster. They belong in cluster.yaml, not in a committed sweep file."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    array_parallelism: Positive = 256
    setup: list[str] = []
    srun_args: list[str] = []
    additional_parameters: dict[str, Scalar] = {}


class Shuffle(_Strict):
    shuffle: int  # the seed


class Axes(_Strict):
    """Parameters: with one value, with all combinations of lists, or with lists in step."""

    fixed: dict[str, Scalar] = {}
    grid: dict[str, Annotated[list[Scalar], Field(min_length=1)]] = {}
    zip: dict[str, Annotated[list[Scalar], Field(min_length=1)]] = {}


class Case(Axes):
    """A block of runs. Its parameters replace those of the sweep."""

    benchmark: str | None = None  # default: that of the sweep
    resources: Resources = Resources()
    launch: Launch = Launch()
    timeout_s: Seconds | None = None

    @field_serializer("resources", "launch")
    def _as_given(self, value: Resources | Launch) -> dict[str, Any]:
        """Omit unset keys, so that they are inherited again when a manifest is read."""
        return value.model_dump(exclude_unset=True)


# The unit of a fact is a suffix of its name, or of a part of it: host_ms.forward is in ms.
SUFFIXES = {"_ms": "ms", "_seconds": "s", "_bytes": "bytes"}


def measured_in(value: str) -> str:
    """Return the unit in the name of a fact, or an empty string."""
    for part in reversed(value.split(".")):
        for suffix, unit in SUFFIXES.items():
            if part.endswith(suffix):
                return unit
    return ""


def units_of_measure(unit: str) -> tuple[str, ...]:
    """Return the units into which a unit can be converted."""
    if unit in ("ms", "s"):
        return TIME_UNITS
    return BYTE_UNITS if unit == "bytes" else ()


def units_of(value: str) -> tuple[str, ...]:
    """Return the units in which a value can be shown."""
    if value.startswith(NAMED):
        return units_of_measure(measured_in(value))
    return {"time": TIME_UNITS, "peak_memory": BYTE_UNITS}.get(value, ())


def unknown_value(name: str) -> str | None:
    """Return the error if no value has this name, else None."""
    if name in VALUES or (name.startswith(NAMED) and name not in NAMED):
        return None
    hint = nearest(name, [*VALUES, *(f"{prefix}<name>" for prefix in NAMED)])
    return f"{name!r} is not known{hint}"


class _View(_Strict):
    """Keys that tables and plots have in common."""

    name: Name
    benchmark: str | None = None  # show its runs; default: that of the sweep
    title: str | None = None
    phase: str | list[str] | None = None  # default: all phases that were measured
    statistic: Literal[STATISTICS] = "median"  # type: ignore[valid-type]
    # applies to the values that have such a unit
    unit: Literal[*TIME_UNITS, *BYTE_UNITS] | None = None  # type: ignore[valid-type]
    direction: Literal["lower", "higher"] | None = (
        None  # which is better; default: depends on the value
    )
    where: str | None = None


class Table(_View):
    """Values of runs in rows and columns; with `list`, the items of a fact in rows."""

    value: str | Annotated[list[str], Field(min_length=1)] = "time"
    rows: list[str] = []
    columns: list[str] = []
    baseline: dict[str, Scalar] | None = None  # speedups are relative to this column
    # name of a fact; the key is `list`, which is a builtin's name
    list_fact: Annotated[str, Field(pattern=r"^[^.]+(\.[^.]+)*$")] | None = Field(
        None, alias="list"
    )
    limit: Positive | None = None  # maximum number of rows per run
    published: list[Published] = []


class Plot(_View):
    value: str = "time"
    x: str
    series: list[str] = []
    facet: list[str] = []


class Sweep(Axes):
    """A sweep file, after inheritance, overrides and cluster settings are applied."""

    name: Name
    description: str = ""
    benchmark: str
    cases: list[Case] = []
    exclude: list[dict[str, Scalar | list[Scalar]] | str] = []
    repeats: Positive = 1
    order: Literal["as_written"] | Shuffle = "as_written"
    resources: Resources = Resources()
    slurm: Slurm = Slurm()
    launch: Launch = Launch()
    runs_per_job: Positive = 1
    timeout_s: Seconds = 600.0
    tables: list[Table] = []
    plots: list[Plot] = []
    filter: str | None = None  # the value of --filter
