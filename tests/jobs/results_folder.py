"""Helpers for tests: sweep files, and results folders filled without running jobs."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs.errors import InputError
from jobs.frame.results import list_results
from jobs.launch.plan_submission import Options, prepare
from jobs.report.plots import plot_figure
from jobs.report.tables.report_table import make_report_table
from jobs.report.tables.table import ReportTable
from jobs.report.views import select
from jobs.results.manifest import Executor, Manifest, write_manifest
from jobs.results.record import BlockPlace, Record
from jobs.results.record_writer import RecordWriter
from jobs.results.run_states import observe
from jobs.run import Run, Shape
from jobs.sweep.expand import expand
from jobs.sweep.load import LoadedSweep, load_sweep
from jobs.sweep.run_sources import RunSources
from jobs.sweep.views import Plot, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CPU = "cpu: Test Processor"
H200 = "NVIDIA H200"
GIB = 2**30
TOY = "name: toy\nbenchmark: tests.benchmarks.toy\n"  # first lines of a sweep file
GRID = "grid: {size: [1, 2], mode: [fast, exact]}\n"  # optional next line
Outcome = dict[str, Any] | None  # status and results of a record; None: the run has no record
# By parameters and repeat, or in a list by size, from 1, or of all
Outcomes = Callable[[dict[str, Any], int], Outcome] | list[Outcome] | Outcome


def write(folder: Path, text: str, name: str = "sweep.yaml") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def errors(path: Path, *overrides: str, **keywords: Any) -> list[str]:
    """Return the problems of an invalid sweep file, with paths relative to its folder."""
    with pytest.raises(InputError) as caught:
        expand(load_sweep(path, overrides, **keywords))
    return [str(p).replace(f"{path.parent}/", "") for p in caught.value.problems]


def load(folder: Path, text: str, *overrides: str, **keywords: Any) -> LoadedSweep:
    return load_sweep(write(folder, text), overrides, **keywords)


def params_of(loaded: LoadedSweep, *names: str) -> list[tuple[Any, ...]]:
    """Return the values of the named parameters of each run, in the order of the runs."""
    return [tuple(run.params[name] for name in names) for run in expand(loaded).runs]


def ok(*samples: float, phase: str = "forward", **facts: Any) -> dict[str, Any]:
    return {"status": "ok", "measurements": {"samples_ms": {phase: list(samples)}} | facts}


def by_mode(fast: Outcome, exact: Outcome) -> Callable[[dict[str, Any], int], Outcome]:
    """Return outcomes that depend on the parameter `mode`."""
    return lambda params, repeat: fast if params["mode"] == "fast" else exact


def failed(status: str, kind: str = "RuntimeError", **failure: Any) -> dict[str, Any]:
    return {"status": status, "failure": {"type": kind, "message": "as asked"} | failure}


def _outcome(outcomes: Outcomes, params: dict[str, Any], repeat: int) -> Outcome:
    if isinstance(outcomes, list):
        return outcomes[params["size"] - 1]
    return outcomes(params, repeat) if callable(outcomes) else outcomes


class ResultsFolder:
    """A results folder into which a test writes records directly, instead of running jobs.

    A sweep may be given as the text of its file, which is then written beside the folder.
    """

    def __init__(self, path: Path):
        self.path = path
        self.clock = time.time() - 10_000
        self.sources = RunSources()

    def submit(
        self,
        sweep: LoadedSweep | str,
        outcomes: Outcomes,
        device: str = CPU,
        force: bool = True,
    ) -> Manifest:
        """Write a manifest and the records of its tasks.

        The jobs count as never started, so a run without a record is missing.

        Args:
            force: include tasks that are already done.
        """
        manifest, writer = self._manifest(sweep, force)
        for job in manifest.jobs:
            for run_id, repeat in job.tasks:
                run = manifest.runs[run_id]
                outcome = _outcome(outcomes, run.params, repeat)
                if outcome is not None:
                    assert writer.write(self.record(manifest, run, repeat, outcome, device))
        return manifest

    def submit_rounds(
        self,
        sweep: LoadedSweep | str,
        outcomes: Outcomes,
        boot: str = "boot",
        gpu: str | None = "GPU-0123abcd",
        rounds: Iterable[int] | None = None,
        trial: bool = False,
        **fields: Any,
    ) -> Manifest:
        """Write a manifest of a sweep with blocks, and the records of rounds.

        Args:
            outcomes: None ends the round.
            gpu: UUID of the GPU. None: a CPU measures.
            rounds: numbers of the rounds. None: all.
            trial: whether to write the records of trials before these rounds instead.
        """
        manifest, writer = self._manifest(sweep)
        for block in manifest.blocks:
            for number in range(block.rounds) if rounds is None else rounds:
                tasks = block.first_tasks(number) if trial else block.tasks(number)
                for position, (run_id, repeat) in enumerate(tasks):
                    run = manifest.runs[run_id]
                    outcome = _outcome(outcomes, run.params, repeat)
                    if outcome is None:
                        break
                    outcome = {"gpus": [{"uuid": gpu}] if gpu else [], **outcome, **fields}
                    outcome["environment"] = {"boot_id": boot, **outcome.get("environment", {})}
                    outcome["block"] = BlockPlace(
                        id=block.id,
                        round=number,
                        execution=f"{manifest.id}-{number}",
                        position=position,
                        size=len(tasks),
                        baseline=run_id == block.baseline,
                        second=block.is_twice(run_id) and repeat % 2 == 1,
                        trial=trial,
                    )
                    device = H200 if gpu else CPU
                    assert writer.write(self.record(manifest, run, repeat, outcome, device))
        return manifest

    def artifacts(self, name: str, content: bytes, *files: str) -> dict[str, str]:
        """Write artifacts of a run. Return the entry of its record that names them."""
        path = self.path / "artifacts" / name
        path.mkdir(parents=True)
        for file in files:
            (path / file).write_bytes(content)
        return {"artifacts": f"artifacts/{name}"}

    def _manifest(
        self, sweep: LoadedSweep | str, force: bool = True
    ) -> tuple[Manifest, RecordWriter]:
        loaded = load(self.path.parent, sweep) if isinstance(sweep, str) else sweep
        options = Options(Executor.local, self.path, force=force)
        manifest = prepare(loaded, options, "sweep.yaml").manifest
        write_manifest(manifest)
        return manifest, RecordWriter(manifest.folder / "records", manifest.id)

    def record(
        self, manifest: Manifest, run: Run, repeat: int, outcome: dict[str, Any], device: str = CPU
    ) -> Record:
        self.clock += 1
        outcome = {"source_hash": self.sources.source_hash(run), **outcome}
        return record(run, outcome, repeat, device, self.clock, manifest.id, manifest.sweep.name)


def run(index: int) -> Run:
    """Return a run of the toy benchmark. Its index makes it unique."""
    return Run(f"{index:016x}", "toy", 1, {"size": index, "label": 'é "x"\n'}, Shape(), 60.0)


def record(
    run: Run,
    outcome: dict[str, Any],
    repeat: int = 0,
    device: str = CPU,
    finished_at: float = 1000.0,
    submission: str = "before",
    sweep: str = "toy",
) -> Record:
    """Return the record of one attempt. The outcome has its other fields."""
    where = {
        "run": run.id,
        "repeat": repeat,
        "attempt": 1,
        "sweep": sweep,
        "submission": submission,
        "job": 0,
        "benchmark": run.benchmark,
        "version": run.version,
        "params": run.params,
        "device": device,
        "started_at": finished_at - 0.5,
        "finished_at": finished_at,
    }
    return Record.model_validate(where | outcome)


def in_round(position: int, size: int, execution: str, **more: Any) -> BlockPlace:
    """Return a place in round 0 of a block. The first process is the baseline."""
    given = {"id": "block", "round": 0, "baseline": position == 0, **more}
    return BlockPlace(position=position, size=size, execution=execution, **given)


def report_table(folder: ResultsFolder, **view: Any) -> ReportTable:
    """Return a table of a folder's runs, which must not be empty."""
    observation = observe(folder.path)
    made = make_report_table(observation, Table(name="t", **view), list_results(observation))
    assert made is not None
    return made


def plot_of(folder: ResultsFolder, title: str = "", **view: Any) -> Figure:
    """Return a plot of a folder's runs, which must not be empty."""
    seen = observe(folder.path)
    made = plot_figure(select(seen, Plot(name="p", **view), list_results(seen)), title)
    assert made is not None
    return made


def rows_of(table: ReportTable) -> list[dict[str, str]]:
    """Return the rows of a table as {column title: text of the cell}."""
    cells = zip(*table.columns.values(), strict=True)
    return [dict(zip(table.columns, row, strict=True)) for row in cells]


def table(folder: ResultsFolder, **view: Any) -> list[dict[str, str]]:
    """Make a table of a folder's runs and return its rows."""
    return rows_of(report_table(folder, **view))
