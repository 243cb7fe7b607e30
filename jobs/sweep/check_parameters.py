"""The checks of what a sweep's runs are made of: parameters, exclusions, `$parameter` references.

The blocks of a sweep may be of several benchmarks. What stands at the top of the file is for each
block as far as its benchmark has the parameter; a comparison is for the runs whose benchmark has
all the parameters that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from jobs.errors import Problem, nearest
from jobs.sweep.benchmarks import Benchmark, Benchmarks
from jobs.sweep.check_schema import (
    benchmark_of,
    literal_check,
    run_blocks,
    valid_entries,
    value_check,
)
from jobs.sweep.conditions import Check, Condition, ConditionError, UnknownParameter
from jobs.sweep.schema import AXES, Scalar, Sweep
from jobs.sweep.strict_yaml import DataPath, Document

ByBenchmark = dict[str, Condition]  # a comparison, as each benchmark that it is for reads it


def comparison(text: str, benchmarks: Benchmarks) -> ByBenchmark:
    """A comparison, for each benchmark that has all the parameters it names.

    Raises:
        ConditionError: it is no comparison, no benchmark has those parameters, or none that has
            them takes the values.
    """
    found: ByBenchmark = {}
    refused: list[ConditionError] = []
    accepted = False
    for benchmark in benchmarks:
        try:
            found[benchmark.name] = Condition(text, benchmark.fields, literal_check(benchmark))
            accepted = True
        except UnknownParameter:
            continue
        except ConditionError as error:
            refused.append(error)
            plain = _unchecked(text, benchmark)
            # A word may be another benchmark's parameter: then this one lacks that.
            if plain is not None and not plain.words & set(benchmarks.fields):
                found[benchmark.name] = plain
    if accepted:
        return found
    if refused:
        raise refused[0]
    Condition(text, benchmarks.fields)  # tells which name is unknown
    raise ConditionError(f"{text!r}: no benchmark of this sweep has all these parameters")


def _unchecked(text: str, benchmark: Benchmark) -> Condition | None:
    try:
        return Condition(text, benchmark.fields)
    except ConditionError:
        return None


def equality(values: Mapping[str, Any], benchmarks: Benchmarks) -> ByBenchmark:
    """That each parameter has this value, for each benchmark that has all of them."""
    condition = Condition.equal(values)
    return {b.name: condition for b in benchmarks if values.keys() <= set(b.fields)}


def exclusions(sweep: Sweep, benchmarks: Benchmarks) -> list[ByBenchmark]:
    """`exclude` as conditions, for a sweep that was checked."""
    return [
        equality(item, benchmarks) if isinstance(item, dict) else comparison(item, benchmarks)
        for item in sweep.exclude
    ]


def check_parameters(document: Document, benchmarks: Benchmarks) -> list[Problem]:
    """What is wrong with a sweep's parameters, conditions and references."""
    checks = _Checks(document, benchmarks)
    checks.parameters()
    checks.conditions()
    checks.references()
    return checks.problems


class _Checks:
    """What has the wrong type is passed over: the schema tells."""

    def __init__(self, document: Document, benchmarks: Benchmarks):
        self.document = document
        self.benchmarks = benchmarks
        self.run_blocks = run_blocks(document, benchmarks)
        self.checks: dict[str, Check] = {b.name: value_check(b) for b in benchmarks}
        self.problems: list[Problem] = []

    def at(self, path: DataPath, what: str) -> None:
        self.problems.append(Problem(self.document.at(path), what))

    def at_key(self, path: DataPath, what: str) -> None:
        self.problems.append(Problem(self.document.at_key(path), what))

    def blocks(self) -> Iterator[tuple[DataPath, dict[str, Any]]]:
        """The sweep itself and its cases."""
        yield (), self.document.data
        cases = self.document.data.get("cases")
        for i, case in enumerate(cases if isinstance(cases, list) else []):
            if isinstance(case, dict):
                yield ("cases", i), case

    def benchmarks_of(
        self, prefix: DataPath, block: dict[str, Any], replaced: Callable[[dict[str, Any]], bool]
    ) -> list[Benchmark]:
        """The benchmarks for which something in a block is said: a case's own; those of all runs
        at the top of the file, unless every case that has one replaces it."""
        if prefix:
            return [benchmark_of(block, self.benchmarks)]
        inherit = {b.name: b for case, b in self.run_blocks if case is block or not replaced(case)}
        every = {b.name: b for _, b in self.run_blocks}
        return list((inherit or every).values())

    def parameters(self) -> None:
        """Every parameter exists, every value is valid for it, no block sets one twice."""
        for prefix, block in self.blocks():
            seen: dict[str, str] = {}
            lengths: dict[str, int] = {}
            for axis in AXES:
                section = block.get(axis)
                for name, value in section.items() if isinstance(section, dict) else ():
                    path = (*prefix, axis, name)
                    having = self.having(prefix, block, name)
                    if not having:
                        self.unknown(path, name, prefix, block)
                        continue
                    if name in seen:
                        self.at_key(path, f"{name!r} is set in both {seen[name]} and {axis}")
                    seen[name] = axis
                    if axis == "fixed":
                        self.values(path, name, [value], having)
                    elif isinstance(value, list):
                        self.values(path, name, value, having)
                        if axis == "zip":
                            lengths[name] = len(value)
            if len(set(lengths.values())) > 1:
                listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
                self.at_key((*prefix, "zip"), f"zip: lists of different lengths: {listed}")

    def having(self, prefix: DataPath, block: dict[str, Any], name: str) -> list[Benchmark]:
        """The benchmarks that get a parameter from a block."""
        given = self.benchmarks_of(prefix, block, partial(_sets, name=name))
        having = [benchmark for benchmark in given if name in benchmark.fields]
        if having or prefix:
            return having
        return [benchmark for _, benchmark in self.run_blocks if name in benchmark.fields][:1]

    def unknown(self, path: DataPath, name: str, prefix: DataPath, block: dict[str, Any]) -> None:
        given = self.benchmarks_of(prefix, block, lambda case: False)
        fields = list(dict.fromkeys(field for benchmark in given for field in benchmark.fields))
        names = " and ".join(repr(benchmark.name) for benchmark in given)
        what = f"benchmark {names} has" if len(given) == 1 else f"benchmarks {names} have"
        self.at_key(path, f"{what} no parameter {name!r}{nearest(name, fields)}")

    def values(
        self, path: DataPath, name: str, values: Iterable[Any], having: list[Benchmark]
    ) -> None:
        """Each value is one that every benchmark takes which gets it."""
        for i, value in enumerate(values):
            place = (*path, i)  # the place of the value itself where it is no list
            if not isinstance(value, (list, dict)):
                for benchmark in having:
                    wrong = self.checks[benchmark.name](name, value)
                    if wrong:
                        of = f" (benchmark {benchmark.name!r})" if len(self.benchmarks) > 1 else ""
                        self.at(place, wrong + of)

    def conditions(self) -> None:
        """Each `exclude` and the filter: parameters that exist, values that these can have."""
        kind = dict[str, Scalar | list[Scalar]] | str
        for path, item in valid_entries(self.document, "exclude", kind):
            if not item:
                self.at(path, "exclude: an empty entry would exclude every run")
            elif isinstance(item, str):
                self.condition(path, item)
            else:
                self.equalities(path, item)
        text = self.document.data.get("filter")
        if isinstance(text, str):
            self.condition(("filter",), text)

    def condition(self, path: DataPath, text: str) -> None:
        try:
            comparison(text, self.benchmarks)
        except ConditionError as error:
            self.at(path, str(error))

    def equalities(self, path: DataPath, values: dict[str, Any]) -> None:
        """Parameters that exist, values that one of the benchmarks takes which have them all."""
        fields = self.benchmarks.fields
        unknown = [name for name in values if name not in fields]
        for name in unknown:
            self.at_key((*path, name), f"{path[0]}: no parameter {name!r}{nearest(name, fields)}")
        having = equality(values, self.benchmarks)
        if not having and not unknown:
            named = ", ".join(map(repr, values))
            self.at(path, f"{path[0]}: no benchmark of this sweep has all of {named}")
        for name, value in values.items():
            if name in unknown:
                continue
            checks = [self.checks[b.name] for b in self.benchmarks if name in b.fields]
            for i, one in enumerate(value if isinstance(value, list) else [value]):
                wrong = [check(name, one) for check in checks]
                if all(wrong):
                    self.at((*path, name, i), str(wrong[0]))

    def references(self) -> None:
        """Each `$name` in resources and launch is a parameter of every benchmark that gets it."""
        for prefix, block in self.blocks():
            for section in ("resources", "launch"):
                given = block.get(section)
                for key, value in given.items() if isinstance(given, dict) else ():
                    if isinstance(value, str) and value.startswith("$"):
                        replaced = partial(_has, section=section, key=key)
                        for benchmark in self.benchmarks_of(prefix, block, replaced):
                            self.reference((*prefix, section, key), value, benchmark)

    def reference(self, path: DataPath, value: str, benchmark: Benchmark) -> None:
        if value[1:] not in benchmark.fields:
            what = f"{path[-1]}: {value!r} names no parameter"
            if len(self.benchmarks) > 1:
                what += f" of benchmark {benchmark.name!r}"
            self.at(path, what + nearest(value[1:], benchmark.fields))


def _sets(case: dict[str, Any], name: str) -> bool:
    """Whether a case gives a parameter."""
    return any(_has(case, axis, name) for axis in AXES)


def _has(case: dict[str, Any], section: str, key: str) -> bool:
    inner = case.get(section)
    return isinstance(inner, dict) and key in inner
