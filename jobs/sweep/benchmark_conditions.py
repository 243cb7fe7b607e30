"""Parses conditions for sweeps whose runs have several benchmarks.

Each benchmark has its own parameters. A comparison, such as `seq_len > 4096`, applies to the runs
whose benchmark has the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jobs.errors import nearest
from jobs.sweep.benchmarks import Benchmark, Benchmarks
from jobs.sweep.check_schema import literal_check
from jobs.sweep.conditions import Check, Condition, ConditionError
from jobs.sweep.schema import Sweep

BENCHMARK = "benchmark"  # name in conditions that stands for the benchmark of a run
ByBenchmark = dict[str, Condition]  # parsed condition, by name of the benchmark


def comparison(
    text: str,
    benchmarks: Benchmarks,
    recorded: Sequence[str] = (BENCHMARK,),
    check: Callable[[Benchmark], Check] | None = None,
) -> ByBenchmark:
    """Parse a comparison for each benchmark.

    The name `benchmark` in the comparison stands for the name of the run's benchmark, unless the
    benchmark has a parameter of this name.

    A benchmark may lack parameters in the comparison (see `of_others` of `Condition`). A value
    needs to be valid in only one of the benchmarks. For example, `mode == exact` is allowed if one
    benchmark has the mode "exact". For the runs of a benchmark without this mode, the comparison is
    False.

    Args:
        recorded: names that the comparison may contain in addition to parameters. See `Condition`.
        check: function that returns the check of plain values for a benchmark. Default: values of
            parameters, and names of benchmarks, must be valid.

    Raises:
        ConditionError: if the text is not a comparison, if it contains an unknown parameter, if all
            benchmarks with a parameter reject its value, or if `and` joins parameters that no
            benchmark has together.
    """
    found: ByBenchmark = {}
    for benchmark in benchmarks:
        checked = check(benchmark) if check else _check_with_benchmark(benchmark, benchmarks)
        found[benchmark.name] = Condition(
            text, benchmark.fields, checked, recorded, of_others=benchmarks.fields, collect=True
        )
    valid = {value for condition in found.values() for value in condition.valid}
    for condition in found.values():
        for value, message in condition.wrong.items():
            if value not in valid:
                raise ConditionError(message)
    if not any(condition.can_hold for condition in found.values()):
        raise ConditionError(
            f"{text!r}: no benchmark of this sweep has all these parameters; "
            "compare parameters of one benchmark only"
        )
    return found


def _check_with_benchmark(benchmark: Benchmark, benchmarks: Benchmarks) -> Check:
    """Return a function that checks a plain value in a comparison, also of the name `benchmark`."""
    of_parameter = literal_check(benchmark)

    def check(name: str, value: Any) -> str | None:
        if name in benchmark.fields:
            return of_parameter(name, value)
        return unknown_benchmark(value, benchmarks)

    return check


def unknown_benchmark(value: Any, benchmarks: Benchmarks) -> str | None:
    """Return an error message if no run of the sweep has this benchmark, else None."""
    known = list(benchmarks.by_name)
    if value in known:
        return None
    return f"no run of this sweep has benchmark {value!r}{nearest(str(value), known)}"


def equality(values: Mapping[str, Any], benchmarks: Benchmarks) -> ByBenchmark:
    """Return conditions that are True if every given parameter has its given value.

    Args:
        values: for each parameter, the required value or a list of allowed values.

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
