"""Forms blocks, groups of runs that are measured in turn (`jobs.block`), from a sweep's runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jobs.block import Block, block_id
from jobs.code.short_names import as_in_runs
from jobs.errors import nearest
from jobs.formatting import format_scalar
from jobs.run import Run
from jobs.sweep.schema import Blocks, Sweep
from jobs.sweep.strict_yaml import Document

LeftOutBy = Callable[[str, dict[str, Any]], str | None]  # of benchmark and parameters


def form_blocks(
    runs: Iterable[Run], sweep: Sweep, document: Document, left_out_by: LeftOutBy
) -> list[Block]:
    """Return the blocks of a sweep, in the order of their first runs.

    `left_out_by` returns the key of the sweep that leaves out a run with some parameters, if any.
    Runs whose benchmark has none of the interleaved parameters are in no block. None is sustained.
    If runs cannot form a block, the document, which has no errors before, has one.
    """
    if sweep.blocks is None or not (sweep.blocks.interleave or sweep.blocks.baseline):
        return []
    return _Former(sweep, sweep.blocks, document, left_out_by).blocks(runs)


class _Former:
    """Forms the blocks of one sweep."""

    def __init__(self, sweep: Sweep, keys: Blocks, document: Document, left_out_by: LeftOutBy):
        self.sweep, self.keys, self.document = sweep, keys, document
        self.left_out_by = left_out_by
        self.baseline = {name: as_in_runs(value) for name, value in keys.baseline.items()}
        self.filter_hint = "; the filter must keep the baseline" if sweep.filter else ""
        self.all_baselines: list[Run] = []

    def blocks(self, runs: Iterable[Run]) -> list[Block]:
        groups: dict[str, list[Run]] = {}
        for run in runs:
            if any(name in run.params for name in self.keys.interleave):
                groups.setdefault(block_id(run, tuple(self.keys.interleave)), []).append(run)
        if not groups:
            listed = ", ".join(self.keys.interleave)
            what = f"blocks.interleave: no run has one of the parameters {listed}"
            self.document.refuse(what, ("blocks", "interleave"))
        every = [run for members in groups.values() for run in members]
        for name, wanted in self.baseline.items():
            found = dict.fromkeys(run.params[name] for run in every if name in run.params)
            if found and wanted not in found:
                hint = nearest(str(wanted), [format_scalar(each) for each in found])
                what = f"blocks.baseline: no run has {name}={format_scalar(wanted)}{hint}"
                self.document.refuse(what + self.filter_hint, ("blocks", "baseline", name))
        if self.document.problems:
            return []
        self.all_baselines = [run for run in every if self.is_baseline(run)]
        return [block for name, members in groups.items() for block in self.block(name, members)]

    def block(self, name: str, members: list[Run]) -> Iterator[Block]:
        """Yield the block of some runs. Yield nothing if they cannot be a block."""
        baselines = [run for run in members if self.is_baseline(run)]
        if len(baselines) != 1:
            what = self.wrong_baseline(members, baselines)
            self.document.refuse(what, ("blocks", "baseline"))
            return
        baseline = baselines[0]
        for run in members:
            if run.shape != baseline.shape:
                what = "blocks: the runs of a block must have the same resources, got"
                each = (f"{one.shape} for {self.compared(one)}" for one in (run, baseline))
                self.document.refuse(f"{what} {' and '.join(each)}", ("blocks",))
                return
        others = [run.id for run in members if run is not baseline]
        yield self.keys.block(name, (baseline.id, *others))

    def is_baseline(self, run: Run) -> bool:
        return all(run.params.get(name, ...) == value for name, value in self.baseline.items())

    def wrong_baseline(self, members: list[Run], baselines: list[Run]) -> str:
        wanted = ", ".join(f"{k}={format_scalar(v)}" for k, v in self.keys.baseline.items())
        names = self.sweep.parameters()
        shared = [name for name in names if name not in self.keys.interleave]
        here = members[0].label(shared) if shared else members[0].benchmark
        hint = ""
        if baselines:
            got = " and ".join(self.compared(run) for run in baselines[:2])
            what = f"{len(baselines)} runs ({got}); set more parameters"
        else:
            valid = dict.fromkeys(self.compared(run) for run in members)
            what = f"none (valid: {', '.join(list(valid)[:5])})"
            wanted_runs = (run.params | self.baseline for run in members)
            keys = (self.left_out_by(members[0].benchmark, params) for params in wanted_runs)
            if key := next(filter(None, keys), None):
                hint = f"; {key} leaves it out"
            elif apart := self.apart_from_baselines(members[0]):
                hint = f"; its run also differs in {' and '.join(apart)}: add that to interleave"
        where = f"for {wanted} in the block {here}"
        return f"blocks.baseline must match one run of each block, got {what} {where}{hint}"

    def apart_from_baselines(self, run: Run) -> list[str]:
        """Return the parameters that keep a run from the block of the nearest baseline."""
        return min(
            (
                [
                    name
                    for name, value in run.params.items()
                    if name not in self.keys.interleave and value != baseline.params.get(name)
                ]
                for baseline in self.all_baselines
            ),
            key=len,
            default=[],
        )

    def compared(self, run: Run) -> str:
        """Return the values of the interleaved parameters of a run, as text."""
        named: dict[str, Any] = {k: run.params[k] for k in self.keys.interleave if k in run.params}
        return " ".join(f"{name}={format_scalar(value)}" for name, value in named.items())
