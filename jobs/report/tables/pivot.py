"""Arranges results of runs in the rows and columns of a table or plot.

A run that failed or is missing has a cell, too. This cell shows the status of the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jobs.errors import nearest
from jobs.formatting import format_range, plural
from jobs.report.metrics import Metric, measured_phases, metrics_of, phases_with
from jobs.report.results import (
    Key,
    Result,
    distinguishing_dimensions,
    names_in_keys,
    notes_on_commits,
    result_notes,
)
from jobs.report.statistics import relative_spread
from jobs.report.tables.basis import attempts_note, basis_note, process_noun
from jobs.report.tables.cell import Cell, over_processes
from jobs.report.views import declared_order, select_results, sort_keys
from jobs.results.record import Measurements
from jobs.results.run_states import Observation
from jobs.run import varying
from jobs.sweep.schema import Plot, Table


@dataclass(frozen=True)
class Pivot:
    """Cells of a table or plot, arranged in rows and columns.

    A dimension is a parameter, or one of phase, device, repeat, value (the metric), commit, host
    and gpu. A row key is a tuple with one value for each dimension of the rows. A column key is a
    tuple with one value for each dimension of the columns.
    """

    view: Table | Plot
    metrics: list[Metric]
    rows: list[str]  # dimensions of the rows
    columns: list[str]  # dimensions of the columns
    row_keys: list[Key]  # in the order of the sweep file
    column_keys: list[Key]  # in the order of the sweep file
    cells: dict[tuple[Key, Key], Cell]  # by row key and column key
    notes: list[str]  # shown below the table
    warnings: list[str]  # printed to stderr, not part of the table
    commits: list[str]  # those of the notes that list several commits
    names: dict[str, str]  # short names of the references that the keys contain


def make_pivot(observation: Observation, view: Table | Plot, results: list[Result]) -> Pivot:
    """Arrange the results of a table or plot in rows and columns.

    Raises:
        TableError: if the table or plot names an unknown parameter, if its `where` condition is
            invalid, or if a prediction fails.
    """
    everything = results
    results, told_apart = select_results(observation, view, results)
    metrics = metrics_of(view)
    rows, columns = _rows_and_columns(view, results)
    wanted = _phases_by_metric(results, view, "phase" in rows)
    phases = list(dict.fromkeys(phase for of_metric in wanted.values() for phase in of_metric))
    if len([phase for phase in phases if phase]) > 1 and "phase" not in (*rows, *columns):
        columns.insert(0, "phase")
    if len(metrics) > 1 and "value" not in (*rows, *columns):
        columns.append("value")
    rows = [*distinguishing_dimensions(results, [*rows, *columns], told_apart), *rows]
    cells: dict[tuple[Key, Key], Cell] = {}
    for result in results:
        for metric in metrics:
            for phase in wanted[metric.name]:
                row = tuple(result.coordinate(name, phase, metric.name) for name in rows)
                column = tuple(result.coordinate(name, phase, metric.name) for name in columns)
                cells.setdefault((row, column), Cell(metric)).add(result, phase)
    order = declared_order(observation, results, told_apart)
    order["phase"] = {phase: i for i, phase in enumerate(phases)}
    order["value"] = {metric.name: i for i, metric in enumerate(metrics)}
    row_keys = sort_keys({row for row, _ in cells}, rows, order)
    column_keys = sort_keys({column for _, column in cells}, columns, order)
    commits = notes_on_commits(results, [*rows, *columns], told_apart)
    basis = basis_note(
        observation,
        results,
        phases,
        next((metric for metric in metrics if metric.is_sampled), None),
        view.statistic,
        with_commit=not commits and "commit" not in [*rows, *columns],
    )
    notes = result_notes(results, commits, _sampling_note(results, view, cells.values()), basis)
    notes += _unmeasured_memory(cells.values())
    notes += _references_left_out(view, results, everything)
    notes += attempts_note(observation, results)
    return Pivot(
        view=view,
        metrics=metrics,
        rows=rows,
        columns=columns,
        row_keys=row_keys,
        column_keys=column_keys,
        cells=cells,
        notes=notes,
        warnings=_unknown_phases(results, view),
        commits=commits,
        names=names_in_keys(results, [*row_keys, *column_keys]),
    )


def _unmeasured_memory(cells: Iterable[Cell]) -> list[str]:
    """Return a note if a cell has no value because a run on a CPU measures no memory of a GPU."""
    has_reason = any(
        "–" in cell.texts
        and cell.metric.is_memory
        and any(record.device.startswith("cpu:") for record in cell.behind)
        for cell in cells
    )
    return ["–: this memory is measured only on a GPU"] if has_reason else []


def _references_left_out(
    view: Table | Plot, results: list[Result], everything: list[Result]
) -> list[str]:
    """Return a note if the condition of a table leaves out all results of an implementation.

    Only implementations outside this project are named. The author of the sweep file did not know
    them. `results` are those that it shows, and `everything` all results of the folder.
    """
    benchmarks = {result.run.benchmark for result in results}
    shown = {reference for result in results for reference in result.run.code}
    absent = dict.fromkeys(
        reference
        for result in everything
        if result.run.benchmark in benchmarks
        for reference in result.run.code
        if reference not in shown
    )
    return [f"not shown, because of where: {view.where}: {', '.join(absent)}"] if absent else []


def _rows_and_columns(view: Table | Plot, results: list[Result]) -> tuple[list[str], list[str]]:
    """Return the names of the row dimensions and of the column dimensions of a table or plot.

    A dimension is a parameter or one of the other names that `views.dimensions` lists. If a table
    declares neither rows nor columns, its dimensions are the parameters that vary among the
    runs. In this case, `implementation` and `backend` are columns, and all others are rows.
    """
    if isinstance(view, Plot):
        return [*view.facet, view.x], list(view.series)
    if view.rows or view.columns:
        return list(view.rows), list(view.columns)
    swept = varying([result.run for result in results])
    columns = [name for name in swept if name in ("implementation", "backend")]
    return [name for name in swept if name not in columns], columns


def _phases_by_metric(
    results: list[Result], view: Table | Plot, in_rows: bool
) -> dict[str, list[str]]:
    """Return the phases that a table or plot shows for each metric, by name of the metric.

    If the table or plot declares phases, these phases are shown. Otherwise, all phases in which the
    metric was measured are shown. If a metric has no phases, the result for this metric is [""], so
    that it has one column. However, if each row is for one phase (`in_rows`), the result for this
    metric is the phases of all rows, so that its value is repeated in each row.
    """
    given, measured = _given_phases(view), _measurements(results)
    found: dict[str, list[str]] = {}
    for metric in metrics_of(view):
        have = dict.fromkeys(phase for m in measured for phase in phases_with(m, metric.name))
        found[metric.name] = (given or list(have)) if metric.has_phases else []
    every = list(dict.fromkeys(phase for phases in found.values() for phase in phases))
    instead = every if in_rows and every else [""]
    return {name: phases or instead for name, phases in found.items()}


def _given_phases(view: Table | Plot) -> list[str]:
    return [view.phase] if isinstance(view.phase, str) else list(view.phase or [])


def _measurements(results: list[Result]) -> list[Measurements]:
    return [result.measurements for result in results if result.measurements]


def _unknown_phases(results: list[Result], view: Table | Plot) -> list[str]:
    """Return a warning for each phase that the table or plot declares but no run has."""
    has = list(dict.fromkeys(p for m in _measurements(results) for p in measured_phases(m)))
    unknown = [phase for phase in _given_phases(view) if has and phase not in has]
    return [f"no run has phase {phase!r}{nearest(phase, has)}" for phase in unknown]


def _sampling_note(results: list[Result], view: Table | Plot, cells: Iterable[Cell]) -> str:
    """Return a note that describes the samples in the cells of a table.

    For runs in blocks, the note states the statistic over processes, and what the interval is. For
    other runs, it states the statistic, the number of samples per cell and the spread of the
    samples. Return "" if no cell has more than one sample.
    """
    filled = [cell for cell in cells if cell.processes]
    paired = [cell for cell in filled if cell.is_in_block and cell.metric.is_timed]
    alone = [cell for cell in filled if not cell.is_in_block and cell.metric.is_sampled]
    parts = _block_note(view.statistic, paired, process_noun(results)) if paired else []
    if max((len(cell.all_samples) for cell in alone), default=0) > 1:
        of_samples, spread = _spread_note(view.statistic, alone)
        parts += [f"not in blocks: {of_samples}" if paired else of_samples, spread]
    if parts and any(_has_ranks(m) for m in _measurements(results)):
        parts.insert(1, "slowest rank of each sample")
    return "; ".join(parts)


def _block_note(statistic_name: str, cells: list[Cell], noun: str) -> list[str]:
    """Return the statistic of cells of runs in blocks, and the meaning of the interval.

    There must be at least one cell. For `noun`, see `process_noun`.
    """
    name = {"mean_std": "mean ± standard deviation"}.get(
        statistic_name, over_processes(statistic_name)
    )
    processes = format_range([len(cell.processes) for cell in cells])
    text = f"{name} over {plural(noun)} ({processes} a cell)"
    counts = [len(process.samples) for cell in cells for process in cell.processes]
    if max(counts) > 1:
        of_process = statistic_name.removesuffix("_std")
        text += f" of the {of_process} of {format_range(counts)} samples"
    if any(cell.interval(statistic_name) for cell in cells):
        return [text, f"±: half of the 95% interval of the mean over {plural(noun)}"]
    return [text]


def _spread_note(statistic_name: str, cells: list[Cell]) -> tuple[str, str]:
    """Return the statistic and the number of samples of cells, and their spread."""
    name = {"mean_std": "mean ± standard deviation"}.get(statistic_name, statistic_name)
    samples = [cell.all_samples for cell in cells]
    spreads = [relative_spread(of_cell) for of_cell in samples if len(of_cell) > 1]
    return (
        f"{name} of {format_range([len(of_cell) for of_cell in samples])} samples",
        f"interquartile range {np.median(spreads):.1%} of the median in a typical cell, "
        f"at most {max(spreads):.1%}",
    )


def _has_ranks(measurements: Measurements) -> bool:
    return any(not isinstance(of[0], (int, float)) for of in measurements.samples_ms.values())
