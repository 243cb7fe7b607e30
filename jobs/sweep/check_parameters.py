"""Checks the parameters of a sweep file, and the settings that name parameters.

Settings that name parameters are the entries of `exclude`, the condition of `--where`, and values
such as `$nodes` in the keys `resources` and `launch`.

A scope is an entry of `cases`, or the top level of the file. Each case may have a different
benchmark. A parameter at the top level applies to every case whose benchmark has this parameter. A
comparison, such as `seq_len > 4096`, applies to the runs whose benchmark has the parameters in the
comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from jobs.errors import ENOUGH, Problem, nearest
from jobs.sweep.benchmark_conditions import BENCHMARK, comparison, equality, unknown_benchmark
from jobs.sweep.benchmarks import Benchmark, Benchmarks
from jobs.sweep.check_schema import (
    benchmark_of,
    run_scopes,
    valid_entries,
    value_check,
)
from jobs.sweep.conditions import Check, ConditionError
from jobs.sweep.schema import AXES, Scalar
from jobs.sweep.strict_yaml import DataPath, Document

SHOWN_VALUES = 5  # maximum number of wrong values of one list that are reported one by one


def check_parameters(document: Document, benchmarks: Benchmarks) -> list[Problem]:
    """Return the errors in a sweep file's parameters and in the settings that name parameters.

    Settings that name parameters are the entries of `exclude`, the condition of `--where`, and
    values such as `$nodes` in the keys `resources` and `launch`.

    Args:
        document: the parsed sweep file.
        benchmarks: the benchmarks of the sweep.
    """
    checks = _Checks(document, benchmarks)
    checks.parameters()
    checks.conditions()
    checks.references()
    return checks.problems


class _Checks:
    """Checks the parameters of a sweep file, and collects the errors in `problems`.

    Values of a wrong type are skipped, because `validate_schema` reports them.
    """

    def __init__(self, document: Document, benchmarks: Benchmarks):
        self.document = document
        self.benchmarks = benchmarks
        self.run_scopes = run_scopes(document, benchmarks)
        self.checks: dict[str, Check] = {b.name: value_check(b) for b in benchmarks}
        self.problems: list[Problem] = []
        # Positions of values that could not be parsed. They are None in the data.
        self.unread = {problem.position for problem in document.problems}

    def at(self, path: DataPath, what: str) -> None:
        self.problems.append(Problem(self.document.at(path), what))

    def at_key(self, path: DataPath, what: str) -> None:
        self.problems.append(Problem(self.document.at_key(path), what))

    def scopes(self) -> Iterator[tuple[DataPath, dict[str, Any]]]:
        """Yield the path and the data of the sweep file's top level, then of each case."""
        yield (), self.document.data
        cases = self.document.data.get("cases")
        for i, case in enumerate(cases if isinstance(cases, list) else []):
            if isinstance(case, dict):
                yield ("cases", i), case

    def benchmarks_of(
        self, prefix: DataPath, scope: dict[str, Any], replaced: Callable[[dict[str, Any]], bool]
    ) -> list[Benchmark]:
        """Return the benchmarks to which a setting in a scope applies.

        A scope is a case, or the top level of the sweep file. A setting in a case applies to the
        benchmark of the case. A setting at the top level applies to the benchmarks of the cases
        that do not replace the setting. If every case replaces the setting, the benchmarks of all
        cases are returned, so that the setting is checked anyway.

        Args:
            prefix: path of the scope, empty for the top level.
            scope: data of the scope.
            replaced: function that takes the data of a case. It returns True if the case replaces
                the setting.
        """
        if prefix:
            return [benchmark_of(scope, self.benchmarks)]
        inherit = {b.name: b for case, b in self.run_scopes if case is scope or not replaced(case)}
        every = {b.name: b for _, b in self.run_scopes}
        return list((inherit or every).values())

    def parameters(self) -> None:
        """Check the names and values of all parameters, and collect the errors.

        A scope is a case, or the top level of the sweep file. A scope must not set a parameter
        twice. The lists in the key `zip` of a scope must have equal lengths.
        """
        for prefix, scope in self.scopes():
            seen: dict[str, str] = {}
            lengths: dict[str, int] = {}
            for axis in AXES:
                section = scope.get(axis)
                for name, value in section.items() if isinstance(section, dict) else ():
                    path = (*prefix, axis, name)
                    having = self.having(prefix, scope, name)
                    if not having:
                        self.unknown(path, name, prefix, scope)
                        continue
                    if name in seen:
                        self.at_key(
                            path, f"{name!r} is set in both {seen[name]} and {axis}; keep one"
                        )
                    seen[name] = axis
                    if axis == "fixed":
                        self.values(path, name, [value], having)
                    elif isinstance(value, list):
                        self.values(path, name, value, having)
                        if axis == "zip":
                            lengths[name] = len(value)
            if len(set(lengths.values())) > 1:
                listed = ", ".join(f"{length} for {name!r}" for name, length in lengths.items())
                self.at_key(
                    (*prefix, "zip"), f"zip: all lists must have the same length, got {listed}"
                )

    def having(self, prefix: DataPath, scope: dict[str, Any], name: str) -> list[Benchmark]:
        """Return the benchmarks that use the value which a scope gives to a parameter.

        A scope is a case, or the top level of the sweep file. A case that sets the parameter does
        not use the value at the top level. If no case uses the value at the top level, one
        benchmark with the parameter is returned, so that the value is checked anyway.

        Args:
            prefix: path of the scope, empty for the top level.
            scope: data of the scope.
            name: name of the parameter.
        """
        given = self.benchmarks_of(prefix, scope, partial(_sets, name=name))
        having = [benchmark for benchmark in given if name in benchmark.fields]
        if having or prefix:
            return having
        return [benchmark for _, benchmark in self.run_scopes if name in benchmark.fields][:1]

    def unknown(self, path: DataPath, name: str, prefix: DataPath, scope: dict[str, Any]) -> None:
        given = self.benchmarks_of(prefix, scope, lambda case: False)
        fields = list(dict.fromkeys(field for benchmark in given for field in benchmark.fields))
        names = " and ".join(repr(benchmark.name) for benchmark in given)
        what = f"benchmark {names} has" if len(given) == 1 else f"benchmarks {names} have"
        self.at_key(path, f"{what} no parameter {name!r}{nearest(name, fields)}")

    def values(
        self, path: DataPath, name: str, values: Iterable[Any], having: list[Benchmark]
    ) -> None:
        """Check the values of one parameter, and collect the errors.

        Args:
            path: path of the parameter in the sweep file.
            name: name of the parameter.
            values: the values. Lists, mappings and values that cannot be parsed are skipped.
            having: the benchmarks that use these values.
        """
        count = 0
        for i, value in enumerate(values):
            place = (*path, i)  # for a single value, `Document.at` ignores the index
            is_read = self.document.at(place) not in self.unread
            if is_read and not isinstance(value, (list, dict)):
                for benchmark in having:
                    wrong = self.checks[benchmark.name](name, value)
                    count += bool(wrong)
                    if wrong and count <= SHOWN_VALUES:
                        of = f" (benchmark {benchmark.name!r})" if len(self.benchmarks) > 1 else ""
                        self.at(place, wrong + of)
        if count > SHOWN_VALUES:
            self.at(path, f"{name}: {count - SHOWN_VALUES} more values of this list are not valid")

    def conditions(self) -> None:
        """Check the entries of `exclude` and the filter, and collect the errors.

        Their parameters must exist, and the values must be valid for these parameters.
        """
        kind = dict[str, Scalar | list[Scalar]] | str
        for path, item in valid_entries(self.document, "exclude", kind):
            if len(self.problems) >= ENOUGH:
                return
            if not item:
                self.at(path, "exclude: an empty entry would exclude every run; remove it")
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
        """Check an entry of `exclude` that gives required values of parameters.

        Each parameter must exist, and at least one benchmark must have all of them. Each value must
        be valid in at least one benchmark. Errors are collected in `problems`.

        Args:
            path: path of the entry in the sweep file.
            values: for each parameter, the required value or a list of allowed values.
        """
        fields = self.benchmarks.fields
        unknown = [name for name in values if name not in (*fields, BENCHMARK)]
        for name in unknown:
            self.at_key(
                (*path, name),
                f"{path[0]}: no benchmark of this sweep has a parameter "
                f"{name!r}{nearest(name, fields)}",
            )
        having = equality(values, self.benchmarks)
        if not having and not unknown:
            named = ", ".join(map(repr, values))
            self.at(
                path,
                f"{path[0]}: no benchmark of this sweep has all the parameters {named}; "
                "use parameters of one benchmark only",
            )
        for name, value in values.items():
            if name in unknown:
                continue
            checks = [self.checks[b.name] for b in self.benchmarks if name in b.fields] or [
                lambda _, one: unknown_benchmark(one, self.benchmarks)
            ]
            for i, one in enumerate(value if isinstance(value, list) else [value]):
                wrong = [check(name, one) for check in checks]
                if all(wrong):
                    self.at((*path, name, i), str(wrong[0]))

    def references(self) -> None:
        """Check values such as `$nodes` in `resources` and `launch`, and collect the errors.

        The name after the `$` must be a parameter of the benchmark.
        """
        for prefix, scope in self.scopes():
            for section in ("resources", "launch"):
                given = scope.get(section)
                for key, value in given.items() if isinstance(given, dict) else ():
                    if isinstance(value, str) and value.startswith("$"):
                        replaced = partial(_has, section=section, key=key)
                        for benchmark in self.benchmarks_of(prefix, scope, replaced):
                            self.reference((*prefix, section, key), value, benchmark)

    def reference(self, path: DataPath, value: str, benchmark: Benchmark) -> None:
        if value[1:] not in benchmark.fields:
            what = f"{path[-1]}: {value!r} does not name a parameter"
            if len(self.benchmarks) > 1:
                what += f" of benchmark {benchmark.name!r}"
            self.at(path, what + nearest(value[1:], benchmark.fields))


def _sets(case: dict[str, Any], name: str) -> bool:
    return any(_has(case, axis, name) for axis in AXES)


def _has(case: dict[str, Any], section: str, key: str) -> bool:
    inner = case.get(section)
    return isinstance(inner, dict) and key in inner
