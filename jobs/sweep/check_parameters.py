"""Checks the parameters of a sweep file, and the settings that name parameters.

Settings that name parameters are the entries of `exclude`, the filter of the option `--filter`, and
values such as `$nodes` in the keys `resources` and `launch`.

A scope is an entry of `cases`, or the top level of the file. Each case may have a different
benchmark. A parameter at the top level applies to every case whose benchmark has this parameter. A
comparison, such as `seq_len > 4096`, applies to the runs whose benchmark has all parameters in the
comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from jobs.errors import ENOUGH, Problem, nearest
from jobs.sweep.benchmarks import Benchmark, Benchmarks
from jobs.sweep.check_schema import (
    benchmark_of,
    literal_check,
    run_scopes,
    valid_entries,
    value_check,
)
from jobs.sweep.conditions import Check, Condition, ConditionError, UnknownParameter
from jobs.sweep.schema import AXES, Scalar, Sweep
from jobs.sweep.strict_yaml import DataPath, Document

BENCHMARK = "benchmark"  # name in conditions that stands for the benchmark of a run
SHOWN_VALUES = 5  # maximum number of wrong values of one list that are reported one by one
ByBenchmark = dict[str, Condition]  # parsed condition, by name of the benchmark


def comparison(
    text: str,
    benchmarks: Benchmarks,
    recorded: Sequence[str] = (BENCHMARK,),
    check: Callable[[Benchmark], Check] | None = None,
) -> ByBenchmark:
    """Parse a comparison for each benchmark that has all parameters in the comparison.

    The name `benchmark` in the comparison stands for the name of the run's benchmark, unless the
    benchmark has a parameter of this name.

    A value in the comparison needs to be valid in only one of these benchmarks. For example,
    `mode == exact` is allowed if one benchmark has the mode "exact". For the runs of a benchmark
    without this mode, the comparison is False.

    Args:
        text: the comparison, such as `seq_len > 4096`.
        benchmarks: the benchmarks of the sweep.
        recorded: names that the comparison may contain in addition to parameters. See `Condition`.
        check: function that returns the check of plain values for a benchmark. Default: values of
            parameters, and names of benchmarks, must be valid.

    Returns:
        The parsed condition for each of these benchmarks, by name of the benchmark.

    Raises:
        ConditionError: if the text is not a comparison, if no benchmark has all parameters in the
            comparison, or if all benchmarks with these parameters reject a value.
    """
    found: ByBenchmark = {}
    refused: list[ConditionError] = []
    accepted = False
    for benchmark in benchmarks:
        checked = check(benchmark) if check else _check_with_benchmark(benchmark, benchmarks)
        try:
            found[benchmark.name] = Condition(text, benchmark.fields, checked, recorded)
            accepted = True
        except UnknownParameter:
            continue
        except ConditionError as error:
            refused.append(error)
            plain = _unchecked(text, benchmark, recorded)
            # An unquoted word may be a parameter of another benchmark. This benchmark then lacks
            # a parameter of the comparison and is skipped.
            if plain is not None and not plain.words & set(benchmarks.fields):
                found[benchmark.name] = plain
    if accepted:
        return found
    if refused:
        raise refused[0]
    # Raise an error that names the unknown parameter.
    Condition(text, benchmarks.fields, recorded=recorded)
    raise ConditionError(
        f"{text!r}: no benchmark of this sweep has all these parameters; "
        "compare parameters of one benchmark only"
    )


def _check_with_benchmark(benchmark: Benchmark, benchmarks: Benchmarks) -> Check:
    """Return a function that checks a plain value in a comparison, also of the name `benchmark`."""
    of_parameter = literal_check(benchmark)

    def check(name: str, value: Any) -> str | None:
        if name in benchmark.fields:
            return of_parameter(name, value)
        return _unknown_benchmark(value, benchmarks)

    return check


def _unknown_benchmark(value: Any, benchmarks: Benchmarks) -> str | None:
    """Return an error message if no run of the sweep has this benchmark, else None."""
    known = list(benchmarks.by_name)
    if value in known:
        return None
    return f"no run of this sweep has benchmark {value!r}{nearest(str(value), known)}"


def _unchecked(text: str, benchmark: Benchmark, recorded: Sequence[str]) -> Condition | None:
    try:
        return Condition(text, benchmark.fields, recorded=recorded)
    except ConditionError:
        return None


def equality(values: Mapping[str, Any], benchmarks: Benchmarks) -> ByBenchmark:
    """Return conditions that are True if every given parameter has its given value.

    Args:
        values: for each parameter, the required value or a list of allowed values.
        benchmarks: the benchmarks of the sweep.

    Returns:
        One condition for each benchmark that has all given parameters, by name of the benchmark.
    """
    condition = Condition.equal(values)
    return {b.name: condition for b in benchmarks if values.keys() <= {*b.fields, BENCHMARK}}


def exclusions(sweep: Sweep, benchmarks: Benchmarks) -> list[ByBenchmark]:
    """Parse the `exclude` entries of a valid sweep. Runs that match an entry are left out.

    Returns:
        For each entry, the condition for each benchmark to which it applies, by name of the
        benchmark.
    """
    return [
        equality(item, benchmarks) if isinstance(item, dict) else comparison(item, benchmarks)
        for item in sweep.exclude
    ]


def check_parameters(document: Document, benchmarks: Benchmarks) -> list[Problem]:
    """Return the errors in a sweep file's parameters and in the settings that name parameters.

    Settings that name parameters are the entries of `exclude`, the filter of the option `--filter`,
    and values such as `$nodes` in the keys `resources` and `launch`.

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
                lambda _, one: _unknown_benchmark(one, self.benchmarks)
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
