"""Checks the values of a sweep file that become lines of the sbatch script.

sbatch and the shell read the script line by line, so a line break in a value would add a line.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from jobs.errors import Problem
from jobs.sweep.strict_yaml import DataPath, Document

ONE_LINE = ("partition", "account", "qos", "constraint", "exclude", "srun_args")
_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")  # name of an option of sbatch
# Options with which sbatch does not submit one job per job of the sweep, or does not print its id,
# or with which the jobs lack their environment or their output.
RESERVED = (
    "array", "error", "export", "export-file", "help", "input", "output", "parsable", "test-only",
    "usage", "version", "wait", "wrap",
)  # fmt: skip
LEAST_MEM_GB = 0.001  # a smaller value becomes --mem=0MB, which requests all memory of a node


def check_slurm(document: Document) -> list[Problem]:
    """Return the errors in the values of `slurm` and in the memory of `resources`.

    Values of a wrong type are skipped, because `validate_schema` reports them.
    """
    problems = [Problem(document.at(path), what) for path, what in _memory(document.data)]
    slurm = document.data.get("slurm")
    if not isinstance(slurm, dict):
        return problems
    for key in ONE_LINE:
        for path, value in _texts(("slurm", key), slurm.get(key)):
            if any(unicodedata.category(character) == "Cc" for character in value):
                what = f"{_dotted(path)} must be one line without control characters, got {value!r}"
                problems.append(Problem(document.at(path), what))
    for path, value in _texts(("slurm", "setup"), slurm.get("setup")):
        if "\0" in value:
            what = f"{_dotted(path)} must not contain a NUL character, got {value!r}"
            problems.append(Problem(document.at(path), what))
    given = slurm.get("additional_parameters")
    for name, value in given.items() if isinstance(given, dict) else ():
        path = ("slurm", "additional_parameters", name)
        if not _OPTION.fullmatch(name):
            what = (
                "slurm.additional_parameters: a key must be an option of sbatch without the "
                f"leading --, such as mail-type, got {name!r}"
            )
            problems.append(Problem(document.at_key(path), what))
        elif name.replace("_", "-") in RESERVED:
            what = f"slurm.additional_parameters: {name!r} is set by the submit command; remove it"
            problems.append(Problem(document.at_key(path), what))
        elif any(unicodedata.category(character) == "Cc" for character in str(value)):
            what = f"{_dotted(path)} must be one line without control characters, got {value!r}"
            problems.append(Problem(document.at(path), what))
    return problems


def _dotted(path: DataPath) -> str:
    return ".".join(map(str, path))


def _texts(path: DataPath, value: Any) -> Iterator[tuple[DataPath, str]]:
    """Yield the paths and values of a text or of the texts in a list."""
    for i, one in enumerate(value if isinstance(value, list) else [value]):
        if isinstance(one, str):
            yield ((*path, i) if isinstance(value, list) else path), one


def _memory(data: dict[str, Any]) -> Iterator[tuple[DataPath, str]]:
    cases = data.get("cases")
    blocks: list[tuple[DataPath, Any]] = [((), data)]
    blocks += [
        (("cases", i), case) for i, case in enumerate(cases if isinstance(cases, list) else [])
    ]
    for prefix, block in blocks:
        resources = block.get("resources") if isinstance(block, dict) else None
        value = resources.get("mem_gb") if isinstance(resources, dict) else None
        if isinstance(value, float) and 0 < value < LEAST_MEM_GB:
            path = (*prefix, "resources", "mem_gb")
            yield path, f"{_dotted(path)} must be at least {LEAST_MEM_GB}, got {value}"
