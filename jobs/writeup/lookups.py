"""Looks up the numbers of an answer in the results. They know the records behind them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from statistics import median
from typing import Any

from jobs.errors import TableError, nearest
from jobs.formatting import format_scalar
from jobs.frame.metrics import fact_at, metric_named, phases_with
from jobs.frame.results import Result
from jobs.frame.rows import NO_VALUE, Cell, rows_of
from jobs.frame.statistics import statistic
from jobs.published.figures import published_figure
from jobs.report.tables.notes import basis_note
from jobs.report.tables.speedup import speedup_of
from jobs.results.record import Record
from jobs.status import Status
from jobs.sweep.views import STATISTICS, units_of, unknown_value
from jobs.writeup.coverage import ONCE, asked_cells
from jobs.writeup.language import Missing
from jobs.writeup.studies import Registry, Study
from jobs.writeup.traced import Recorded, Traced, marked

ONE_NUMBER = [name for name in STATISTICS if name != "mean_std"]
# Numbers in the message of torch's OutOfMemoryError, in GiB
_OUT_OF_MEMORY = {
    "capacity": r"total capacity of ([\d.]+) GiB",
    "unused": r"([\d.]+) GiB is reserved by PyTorch but unallocated",
}


class AnswerLookups:
    """Functions of a template that look up results of one kind of device."""

    def __init__(self, study: Study | None, studies: Mapping[str, Study], registry: Registry):
        self.found = 0  # number of looked-up values that were measured
        self.missing = 0  # number of looked-up values that were not measured
        self.impossible = 0  # number of those of runs that ended as oom or unsupported
        self._study, self._studies = study, studies
        self._registry = registry
        self._used: dict[int, tuple[Study, Record]] = {}  # by number
        self._cells: list[Cell] = []

    def value(
        self,
        name: str,
        phase: str | None = None,
        statistic: str = "median",
        unit: str | None = None,
        sweep: str | None = None,
        **params: Any,
    ) -> Any:
        """Return a metric of one run. The number knows its records.

        It is a text if the metric is one, and NotMeasured if there is none, for example because the
        run failed or is missing.

        Args:
            name: name of the metric, such as time or fact.weights_bytes. The prefix `fact.` marks a
                value that the benchmark returned in addition to times and memory.
            phase: phase of the run, such as forward. None: the metric exists in one phase only.
            unit: unit of the number. None: the default unit of the metric.
            sweep: name of the study. None: that of the part.
            params: parameters that select the run.

        Raises:
            TableError: if the metric, statistic or unit is unknown, or if several runs or phases
                have such a metric.
        """
        study = self._named(sweep)
        cell = self._cell(study, name, phase, statistic, unit, params)
        found = None if cell is None else _value_of(cell)
        if study is None or cell is None or found is None:
            return self._none(study, params)
        numbers = self._use(study, cell.all_records)
        return Recorded(found) if isinstance(found, str) else Traced(found, numbers)

    def state(self, sweep: str | None = None, **params: Any) -> Any:
        """Return how one run ended. NotMeasured if it did not end by itself.

        If a run has several repeats, its status is ok if at least one repeat is ok.
        """
        results = self._results(self._named(sweep), params)
        _require_one_run("state()", results, params)
        states = [result.status for result in results]
        state = Status.ok if Status.ok in states else (states or [Status.missing])[0]
        is_open = state.is_live or state.runs_again_on_submit
        return self.missing_number() if is_open else str(state)

    def items(
        self, path: str, key: str | None = None, sweep: str | None = None, **params: Any
    ) -> Any:
        """Return the items of a list that a run returned, such as kernels.forward.

        Args:
            path: path of the list in the facts of the run.
            key: field of the items by whose values they are returned, as a dict.
            sweep: name of the study. None: that of the part.
            params: parameters that select the run. Of several repeats, the first is used.

        Returns:
            Dicts whose numbers know their record. NotMeasured if there is no list.
        """
        study = self._named(sweep)
        record = self._record(f"items({path!r})", study, params, "ok")
        if study is None or record is None or record.measurements is None:
            return self._none(study, params)
        fact = fact_at(record.measurements.facts, path.split("."))
        if not isinstance(fact, list):
            return self.missing_number()
        (number,) = self._use(study, [record])
        found = [{name: _traced(value, number) for name, value in item.items()} for item in fact]
        return found if key is None else {item[key]: item for item in found}

    def failure(self, status: str, sweep: str | None = None, **params: Any) -> Any:
        """Return how one run failed, as a dict of the fields of `failure` in its record.

        If GPU memory ran out, the dict also has the numbers in torch's message, in GiB: `capacity`
        of the GPU, and `unused`, which torch holds in free blocks. Fields without a value are
        NotMeasured, and so is the dict if the run has another status than the given one. If it is
        ok, nothing is missing.
        """
        study = self._named(sweep)
        record = self._record("failure()", study, params, status)
        if study is None or record is None or record.failure is None:
            return self._none(study, params, ends=("ok",))
        (number,) = self._use(study, [record])
        fields = record.failure.model_dump()
        for name, pattern in _OUT_OF_MEMORY.items():
            found = re.search(pattern, record.failure.message)
            fields[name] = float(found[1]) if found else None
        return {
            name: Missing() if value is None else _traced(value, number)
            for name, value in fields.items()
        }

    def speed(
        self, phase: str, baseline: dict[str, Any], sweep: str | None = None, **params: Any
    ) -> Any:
        """Return how many times as fast a run is as another, as text.

        Args:
            phase: phase whose median times are compared.
            baseline: parameters in which the other run differs.
            sweep: name of the study. None: that of the part.
            params: parameters that select the run.

        Returns:
            The text, such as `1.95 [1.93, 1.97]` for runs that were measured in the same rounds and
            `1.95 (not paired)` for others.
        """
        study, both = self._named(sweep), (params, params | baseline)
        run, other = (self._cell(study, "time", phase, "median", None, each) for each in both)
        if study is None or run is None or other is None:
            return self._none(study, *both)
        speedup = speedup_of(run, other, study.observation)
        if speedup.ratio is None:
            return self._none(study, *both)
        ratio, interval = speedup.texts
        if not speedup.paired:
            said = "(not paired)"
        elif not interval:
            said = "(one round)"
        else:
            said = f"({speedup.word})" if speedup.word else ""
        text = " ".join(filter(None, [ratio, interval, said]))
        return marked(text, self._use(study, run.all_records) | self._use(study, other.all_records))

    def basis(self) -> str:
        """Return what the numbers of the answer rest on, such as the number of processes."""
        notes = []
        used = {id(record) for _, record in self._used.values()}
        for study in {study.name: study for study, _ in self._used.values()}.values():
            results = [each for each in study.results if id(each.record) in used]
            devices = ", ".join(dict.fromkeys(each.device for each in results))
            notes.append("; ".join(filter(None, [f"{study.name}: {devices}", basis_note(results)])))
        samples = [each for cell in self._cells if cell.metric.is_timed for each in cell.samples]
        spreads = [statistic(each, "spread") for each in samples if len(each) > 1]
        if spreads:
            notes.append(
                f"Interquartile range {median(spreads):.1%} of the median in a typical process, "
                f"at most {max(spreads):.1%}"
            )
        return ". ".join(notes)

    def stale(self) -> int:
        return sum(study.is_stale(record) for study, record in self._used.values())

    def _named(self, sweep: str | None) -> Study | None:
        return self._study if sweep is None else self._studies.get(sweep)

    def _cell(
        self,
        study: Study | None,
        name: str,
        phase: str | None,
        statistic: str,
        unit: str | None,
        params: dict[str, Any],
    ) -> Cell | None:
        results = self._results(study, params)
        _require_known(name, statistic, unit)
        _require_one_run(f"value({name!r})", results, params)
        metric = metric_named(name, unit)
        rows = [row for r in results for row in rows_of([r], metric, [_phase(name, r, phase)])]
        if not rows:
            return None
        self._cells.append(Cell(rows, statistic))
        return self._cells[-1]

    def _record(
        self, call: str, study: Study | None, params: dict[str, Any], status: str
    ) -> Record | None:
        """Return the first record of one run with a status. Raises TableError for several runs."""
        found = [each for each in self._results(study, params) if each.status == status]
        _require_one_run(call, found, params)
        return next((each.record for each in found if each.record is not None), None)

    def _results(self, study: Study | None, params: dict[str, Any]) -> list[Result]:
        """Return the results of the device that a lookup selects, one for each repeat of its run.

        If the stock sweep has a run with the values, others, such as those with other steps, do not
        count, also if it was not executed. A variant of the sweep, with other runs only, counts.
        """
        if study is None:
            return []
        benchmark = params.get("benchmark")
        values = {name: params[name] for name in params if name != "benchmark"}
        stock = asked_cells(study.name) if study.is_stock else {}
        asked = {id: run for id, (run, _) in stock.items() if benchmark in (None, run.benchmark)}
        results = [each for each in study.results if benchmark in (None, each.run.benchmark)]
        known = [*asked.values(), *(each.run for each in results)]
        if study.results and not any(run.params.keys() >= values.keys() for run in known):
            given = ", ".join(map(str, params))
            raise TableError(f"no run of {study.name} has all of these parameters: {given}")
        is_variant = not any(each.record and each.run.id in asked for each in results)
        if not is_variant and any(run.params | values == run.params for run in asked.values()):
            results = [each for each in results if each.run.id in asked]
        results = [each for each in results if each.run.params | values == each.run.params]
        # CPUs in the folder of a GPU count for what that GPU did not measure.
        on_gpus = [each for each in results if each.record and not each.device.startswith("cpu:")]
        return on_gpus or results

    def _use(self, study: Study, records: Iterable[Record]) -> set[int]:
        self.found += 1
        used = {self._registry.number(study, record): (study, record) for record in records}
        self._used |= used
        return set(used)

    def _none(
        self, study: Study | None, *runs: dict[str, Any], ends: Collection[str] = ONCE
    ) -> Missing:
        """Return that runs have no such number. It is missing unless one of them `ends` so."""
        found = {str(r.status) for params in runs for r in self._results(study, params)}
        if found.isdisjoint(ends):
            return self.missing_number()
        self.impossible += 1
        return Missing()

    def missing_number(self) -> Missing:
        """Count a number that is not known, and return what stands for it."""
        self.missing += 1
        return Missing()


def published(file: str, column: str, **where: Any) -> Any:
    """Return a value that other authors published, as a number if possible: `published_figure`."""
    found = published_figure(file, column, **where)
    try:
        return float(found)
    except ValueError:
        return Recorded(found)


def _require_known(name: str, statistic: str, unit: str | None) -> None:
    """Raise TableError if the metric, the statistic or the unit of a lookup is unknown."""
    if unknown := unknown_value(str(name)):
        raise TableError(f"value {unknown}")
    if statistic not in ONE_NUMBER:
        known = nearest(str(statistic), ONE_NUMBER)
        raise TableError(f"statistic {statistic!r} is not known{known}")
    if unit is not None and unit not in units_of(name):
        valid = ", ".join(units_of(name)) or "only the default unit"
        raise TableError(f"value {name!r} cannot be shown in {unit!r} (valid: {valid})")


def _require_one_run(call: str, results: list[Result], params: Mapping[str, Any]) -> None:
    """Raise TableError if the results that a lookup selects are of several runs or CPUs.

    The message lists the parameters in which the runs differ. `call` is the lookup.
    """
    found: dict[str, dict[str, None]] = {}
    for each in results:
        own = {"benchmark": each.run.benchmark, "device": each.device, **each.run.params}
        for name, value in own.items():
            found.setdefault(name, {})[format_scalar(value)] = None
    differ = [f"{name}: {', '.join(texts)}" for name, texts in found.items() if len(texts) > 1]
    if differ:
        count = len({each.run.id for each in results})
        given = ", ".join(f"{name}={format_scalar(value)}" for name, value in params.items())
        which = f"have {given}" if params else "match"
        what = f"add a parameter in which they differ ({'; '.join(differ)})"
        raise TableError(f"{call}: {count} runs {which}; {what}")


def _phase(name: str, result: Result, given: str | None) -> str:
    """Return the phase, such as forward, in which to look up a metric of a run.

    If no phase is given, the metric must exist in one phase only. Return "" if the metric has no
    phases or the run has no measurements.
    """
    measured = result.measurements
    if given or measured is None:
        return given or ""
    found = phases_with(measured, metric_named(name))
    if len(found) > 1:
        raise TableError(
            f"value({name!r}): the run has several phases; phase must be one of {', '.join(found)}"
        )
    return found[0] if found else ""


def _value_of(cell: Cell) -> float | str | None:
    """Return the number of a cell, or its value that is text. None if it has neither."""
    texts = (text for text in cell.texts if text != NO_VALUE)
    return next(texts, None) if cell.number is None else cell.number


def _traced(value: Any, record: int) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Traced(value, {record})
    return Recorded(value) if isinstance(value, str) else value
