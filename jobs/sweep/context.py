"""What the checks of a sweep file need beside the value that they check, and common types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from jobs.errors import nearest
from jobs.sweep.benchmarks import Benchmark, Benchmarks
from jobs.sweep.conditions import Check, Condition, Names
from jobs.sweep.strict_yaml import entries

Scalar = bool | int | float | str | None
Positive = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]


STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


def names_of(
    benchmarks: Benchmarks, recorded: Sequence[str] = ("benchmark",), check: Check | None = None
) -> Names:
    """Return the names that a condition on runs of some benchmarks may contain, see `Names`."""
    return Names(benchmarks.fields, recorded, check or partial(never_equals, benchmarks))


def condition_of(given: str | Mapping[str, Any], benchmarks: Benchmarks) -> Condition:
    """Return the condition of an entry of `exclude`, of `--where`, or of sustained runs.

    A mapping has a value, or a list of values, for each name.
    """
    if isinstance(given, str):
        return Condition(given, names_of(benchmarks))
    lists = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
    text = " and ".join(f"{name} in {values!r}" for name, values in lists.items())
    return Condition(text, names_of(benchmarks), math.inf)


def never_equals(benchmarks: Benchmarks, name: str, value: Any) -> str | None:
    """Return an error message if a name equals a value in no benchmark, else None."""
    if name == "run.benchmark":
        known = list(benchmarks.by_name)
        hint = nearest(str(value), known)
        return None if value in known else f"no run of this sweep has benchmark {value!r}{hint}"
    wrong = [each.never_equals(name, value) for each in benchmarks if name in each.fields]
    return wrong[0] if all(wrong) else None


class Context:
    """The context of pydantic's validation: the benchmarks of a sweep file, and its cases.

    Without it, as for the manifest of an earlier submission, only keys and types are checked.
    `cases` is the value of this key, which may be invalid.
    """

    def __init__(self, benchmarks: Benchmarks, cases: Any):
        self.benchmarks = benchmarks
        # What describes runs: the cases, or without cases the top level of the file.
        self._scopes = [case for _, case in entries(cases)] or [{}]

    def of(self, name: Any) -> Benchmark:
        """Return the benchmark that a case names. Default: that of the sweep."""
        return self.benchmarks.of(name if isinstance(name, str) else None)

    def used(self) -> list[Benchmark]:
        """Return the benchmarks of the runs."""
        return self.inheriting("", ())

    def inheriting(self, key: str, sections: tuple[str, ...]) -> list[Benchmark]:
        """Return the benchmarks to which a setting at the top level of the file applies.

        These are the benchmarks of the cases that do not set the key in one of the sections. If all
        do, the benchmarks of all cases are returned, so that the setting is checked anyway.
        """
        inherit = [
            scope
            for scope in self._scopes
            if not any(isinstance(s := scope.get(x), dict) and key in s for x in sections)
        ]
        found = [self.of(scope.get("benchmark")) for scope in inherit or self._scopes]
        return list({benchmark.name: benchmark for benchmark in found}.values())
