"""Counts the cells that a part of a problem asks for, on one kind of GPU.

A cell is a run of the stock sweep that the filter of the part selects. It is complete if the run
was executed as often as the sweep repeats it, or in as many rounds as a block needs at least.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations

from jobs.block import FEWEST_ROUNDS
from jobs.formatting import counted, format_scalar
from jobs.frame.results import Result
from jobs.run import Run, varying
from jobs.sweep.expand import expand
from jobs.sweep.load import load_sweep
from jobs.writeup.studies import STOCK, Study

ONCE = ("oom", "unsupported")  # a run that ends so is not executed again


@dataclass(frozen=True)
class Coverage:
    """The cells that a part, or a whole problem, asks for."""

    asked: dict[str, Run] = field(default_factory=dict)  # by run id
    # Run ids: measured with older code, less often than asked, not measured, and those of the last
    # that failed
    stale: frozenset[str] = frozenset()
    few: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()

    def __or__(self, other: Coverage) -> Coverage:
        return Coverage(
            self.asked | other.asked,
            self.stale | other.stale,
            self.few | other.few,
            self.missing | other.missing,
            self.failed | other.failed,
        )

    @property
    def are_complete(self) -> bool:
        """Whether all cells are measured as often as asked, with whatever code."""
        return not self.few and not self.missing

    @property
    def measured(self) -> int:
        """Number of cells that are measured, if only once and with older code."""
        return len(self.asked) - len(self.missing)

    @property
    def count(self) -> str:
        """How many cells are measured, such as `12 of 20 cells`."""
        return f"{self.measured} of {counted(len(self.asked), 'cell')}"

    @property
    def summary(self) -> str:
        """How many cells are measured, and how many of them not as asked."""
        which = "all" if len(self.stale) == self.measured else str(len(self.stale))
        older = f", {which} with older code" if self.stale else ""
        few = f", {len(self.few)} too few times" if self.few else ""
        return f"{self.count}{older}{few}"

    @property
    def text(self) -> str:
        """How many cells are measured, and which are not."""
        parts = [f"{self.count} measured"]
        if self.stale:
            parts.append(f"{len(self.stale)} with older code")
        if self.few:
            parts.append(f"{len(self.few)} in fewer processes than asked: {self._which(self.few)}")
        if self.missing:
            parts.append(f"not measured: {self._which(self.missing)}")
        if self.failed:
            parts.append(f"{len(self.failed)} of these failed: add --retry-failed to repeat them")
        return "; ".join(parts)

    def _which(self, ids: frozenset[str]) -> str:
        """Tell some of the cells, or if this is shorter, the others."""
        rest = frozenset(self.asked.keys() - ids)
        if not rest:
            return "all"
        some, others = self._named(ids), self._named(rest)
        if others[0].isdigit():  # no parameter separates them
            return some
        return min(some, f"all but {others}", key=lambda text: (text[0].isdigit(), len(text)))

    def _named(self, ids: frozenset[str]) -> str:
        """Tell some of the cells by the one or two parameters that separate them best."""
        several = len({run.benchmark for run in self.asked.values()}) > 1
        names = [*(["benchmark"] if several else []), *varying(list(self.asked.values()))]
        found = [(1, 1, len(self.asked) - len(ids), f"{len(ids)} of {len(self.asked)}")]
        for chosen in (*combinations(names, 1), *combinations(names, 2)):
            of_all = Counter(_values(run, chosen) for run in self.asked.values())
            given = Counter(_values(run, chosen) for id, run in self.asked.items() if id in ids)
            mixed = sum(count < of_all[value] for value, count in given.items())
            texts = [
                value
                if given[value] == of_all[value]
                else f"{value} ({given[value]} of {of_all[value]})"
                for value in sorted(given, key=_number)
            ]
            others = sum(of_all[value] - count for value, count in given.items())
            if len(chosen) == 1 or not mixed:
                name = f"{chosen[0]} " if len(chosen) == 1 else ""
                found.append((mixed, len(texts), others, name + ", ".join(texts)))
        return min(found, key=lambda each: each[:3])[3]


def _values(run: Run, names: Sequence[str]) -> str:
    known = {"benchmark": run.benchmark, **run.params}
    values = [format_scalar(known[name]) if name in known else "none" for name in names]
    if len(names) == 1:
        return values[0]
    return " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"-?[0-9.]+(e[-+]?[0-9]+)?", text) else 0.0


@cache
def asked_cells(
    sweep: str, filter: str | None = None, override: str | None = None
) -> dict[str, tuple[Run, int]]:
    """Return the runs of a stock sweep by id, and how often each is executed at least."""
    overrides = [override] if override else []
    loaded = load_sweep(STOCK / f"{sweep}.yaml", overrides, filter)
    expansion = expand(loaded)
    often = {run.id: loaded.sweep.repeats for run in expansion.runs}
    for block in expansion.blocks:
        rounds = FEWEST_ROUNDS if block.auto else block.rounds
        often |= {id: rounds * (2 if block.is_twice(id) else 1) for id in block.runs}
    return {run.id: (run, often[run.id]) for run in expansion.runs}


def coverage_on(study: Study, filter: str | None = None, override: str | None = None) -> Coverage:
    """Return the cells of a stock sweep, as measured on its kind of GPU."""
    asked = asked_cells(study.name, filter, override)
    found: dict[str, list[Result]] = {}
    for result in study.results:
        if result.record is not None and result.status in ("ok", *ONCE):
            found.setdefault(result.run.id, []).append(result)
    missing, few, stale = set(), set(), set()
    for id, (_, often) in asked.items():
        results = found.get(id, [])
        fresh = [r for r in results if r.record is not None and not study.is_stale(r.record)]
        if not results:
            missing.add(id)
        elif not _enough(results, often):
            few.add(id)
        if len(fresh) < len(results) and not _enough(fresh, often):
            stale.add(id)
    failed = {
        result.run.id
        for result in study.results
        if result.status.runs_again_on_retry
        and result.record is not None
        and not study.is_stale(result.record)
    }
    runs = {id: run for id, (run, _) in asked.items()}
    return Coverage(
        runs,
        stale=frozenset(stale),
        few=frozenset(few),
        missing=frozenset(missing),
        failed=frozenset(missing & failed),
    )


def _enough(results: Sequence[Result], often: int) -> bool:
    return len(results) >= often or any(result.status in ONCE for result in results)
