"""What a sweep file may say: the keys, their types and their defaults.

These models are the one declaration of every option; `jobs.sweep.load` reads files into them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer

from jobs.errors import nearest
from jobs.published.figures import Published

Scalar = bool | int | float | str | None
Reference = Annotated[str, Field(pattern=r"^\$[A-Za-z_][A-Za-z0-9_]*$")]  # $name of a parameter
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=365 * 86400)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
AXES = ("fixed", "grid", "zip")  # the sections that set parameters
# What a table may show: facts of a record, or divisions of facts (aggregate.py makes them).
FACT = "fact."  # and a fact's name
PREDICTED = "predicted."  # and the name of what the benchmark's `predict` says of a run
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
)  # may stand beside parameters in a table's rows and columns


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Resources(_Strict):
    """What a job asks for, in submitit's words. Any value may be `$parameter`."""

    nodes: Positive | Reference = 1
    tasks_per_node: Literal[1] = 1  # one worker a node; processes are launch.nproc_per_node
    gpus_per_node: Count | Reference = 0
    cpus_per_task: Positive | Reference | None = None
    mem_gb: Annotated[float, Field(gt=0)] | Reference | None = None
    timeout_min: Positive | Reference | None = None  # default: from timeout_s and runs_per_job


class Launch(_Strict):
    """Processes a node under torchrun; without it, one process and no torchrun."""

    nproc_per_node: Positive | Reference | None = None


class Slurm(_Strict):
    """Cluster facts. They belong in a user's cluster.yaml, not in a committed sweep."""

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
    """What sets parameters: one value, each of a list, or the lists in step."""

    fixed: dict[str, Scalar] = {}
    grid: dict[str, Annotated[list[Scalar], Field(min_length=1)]] = {}
    zip: dict[str, Annotated[list[Scalar], Field(min_length=1)]] = {}


class Case(Axes):
    """A block of runs. What it sets replaces what the sweep sets for the same parameter."""

    benchmark: str | None = None  # default: the sweep's; of its parameters, those that this one has
    resources: Resources = Resources()
    launch: Launch = Launch()
    timeout_s: Seconds | None = None

    @field_serializer("resources", "launch")
    def _as_given(self, value: Resources | Launch) -> dict[str, Any]:
        """What the case leaves out is the sweep's, after a manifest was read back too."""
        return value.model_dump(exclude_unset=True)


# A fact's name says what it was measured in; of host_ms.forward the part before the phase does.
SUFFIXES = {"_ms": "ms", "_seconds": "s", "_bytes": "bytes"}


def measured_in(value: str) -> str:
    """The unit that a fact's name says it was measured in, or nothing."""
    for part in reversed(value.split(".")):
        for suffix, unit in SUFFIXES.items():
            if part.endswith(suffix):
                return unit
    return ""


def units_of_measure(unit: str) -> tuple[str, ...]:
    """The units in which can be shown what was measured in this one."""
    if unit in ("ms", "s"):
        return TIME_UNITS
    return BYTE_UNITS if unit == "bytes" else ()


def units_of(value: str) -> tuple[str, ...]:
    """The units in which a value can be shown."""
    if value.startswith(NAMED):
        return units_of_measure(measured_in(value))
    return {"time": TIME_UNITS, "peak_memory": BYTE_UNITS}.get(value, ())


def unknown_value(name: str) -> str | None:
    """That no value has this name, and which do; None where one has."""
    if name in VALUES or (name.startswith(NAMED) and name not in NAMED):
        return None
    hint = nearest(name, [*VALUES, *(f"{prefix}<name>" for prefix in NAMED)])
    return f"{name!r} is not known{hint}"


class _View(_Strict):
    """What a table and a plot share: which value of which runs."""

    name: Name
    benchmark: str | None = None  # the one whose runs it shows; default: the sweep's
    title: str | None = None
    phase: str | list[str] | None = None  # default: every phase that was measured
    statistic: Literal[STATISTICS] = "median"  # type: ignore[valid-type]
    # of the values that it fits
    unit: Literal[*TIME_UNITS, *BYTE_UNITS] | None = None  # type: ignore[valid-type]
    direction: Literal["lower", "higher"] | None = None  # which is better; default from the value
    where: str | None = None


class Table(_View):
    """Values of runs in rows and columns; or, with `list`, a fact's items in rows."""

    value: str | Annotated[list[str], Field(min_length=1)] = "time"
    rows: list[str] = []
    columns: list[str] = []
    baseline: dict[str, Scalar] | None = None  # speed-ups against these columns
    # the fact's name; `list` in a file, a name that the class needs itself
    list_fact: Annotated[str, Field(pattern=r"^[^.]+(\.[^.]+)*$")] | None = Field(
        None, alias="list"
    )
    limit: Positive | None = None  # of rows a run
    published: list[Published] = []


class Plot(_View):
    value: str = "time"
    x: str
    series: list[str] = []
    facet: list[str] = []


class Sweep(Axes):
    """A sweep file after inheritance, overrides and cluster facts. See README for an example."""

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
    filter: str | None = None  # --filter, kept so that the manifest says what was asked
