"""The keys `resources`, `launch` and `slurm` of a sweep file and of a cluster file."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, PlainValidator, ValidationError

from jobs.sweep.messages import expected
from jobs.sweep.value_types import STRICT, Name, Positive, Scalar

# Options with which sbatch does not submit one job per job of the sweep, or does not print its id,
# or with which the jobs lack their environment, their output or the warning of their time limit.
RESERVED = (
    "array", "error", "export", "export-file", "help", "input", "output", "parsable", "signal",
    "test-only", "usage", "version", "wait", "wrap",
)  # fmt: skip


def _reference(value: Any) -> str:
    if not (isinstance(value, str) and re.fullmatch(r"\$[A-Za-z_][A-Za-z0-9_]*", value)):
        raise ValueError("$PARAMETER")
    return value


def _one_line(value: Scalar) -> Scalar:
    """Check that a line of the sbatch script does not get a line break, which would add a line."""
    if any(unicodedata.category(character) == "Cc" for character in str(value)):
        raise ValueError("one line without control characters")
    return value


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("text without a NUL character")
    return value


def _option(name: str) -> str:
    """Return the name of an option with _ instead of -, as submitit has them."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise ValueError("an option of sbatch without the leading --, such as mail-type")
    return name.replace("-", "_")


_Reference = Annotated[str, PlainValidator(_reference)]  # $PARAMETER
_Count = Annotated[int, Field(ge=0)]
_Line = Annotated[str, AfterValidator(_one_line)]
_Option = Annotated[str, AfterValidator(_option)]


class _Strict(BaseModel):
    model_config = STRICT


class Resources(_Strict):
    """Resources of a job. The keys have the same names as in submitit.

    With `$NAME`, each run uses its own value of the parameter NAME.
    """

    nodes: Positive | _Reference = 1
    gpus_per_node: _Count | _Reference = 0
    # As in Slurm's Gres, such as h100 in gpu:h100:8. Ignored without GPUs, because a cluster file
    # sets it for all sweeps.
    gpu_type: Name | _Reference | None = None
    cpus_per_task: Positive | _Reference | None = None
    # A smaller value would become --mem=0MB, which requests all memory of a node.
    mem_gb: Annotated[float, Field(ge=0.001)] | _Reference | None = None
    timeout_min: Positive | _Reference | None = None  # default: computed from timeout_s
    exclusive: bool = False  # whether no other job runs on the nodes at the same time


class Launch(_Strict):
    """Launch settings of a run."""

    # Processes that torchrun starts on each node. None: one process, without torchrun.
    nproc_per_node: Positive | _Reference | None = None


class Slurm(_Strict):
    """Slurm settings of a cluster. They belong in cluster.yaml, not in a shared sweep file."""

    partition: _Line | None = None
    account: _Line | None = None
    qos: _Line | None = None
    constraint: _Line | None = None
    exclude: _Line | None = None
    array_parallelism: Positive = 256
    setup: list[Annotated[str, AfterValidator(_no_nul)]] = []
    srun_args: list[_Line] = []
    # Shell code that starts Python in the job. Default: the interpreter that submits.
    python: Annotated[str, Field(pattern=r"^\S[^\n\r]*$")] | None = None
    # Options of sbatch without the leading --, such as mail-type
    additional_parameters: dict[_Option, Annotated[Scalar, AfterValidator(_one_line)]] = {}


def wanted_instead(key: str, given: Any) -> str | None:
    """Return which values `$PARAMETER` may have for a key, as text. None: `given` is valid."""
    model = Launch if key == "nproc_per_node" else Resources
    if given is None or str(given).startswith("$"):
        given = []  # refused, too
    try:
        model.model_validate({key: given})
    except ValidationError as error:
        return expected(error, without="$PARAMETER")
    return None
