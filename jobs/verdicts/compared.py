"""One comparison: the verdict on one phase of a run. It is a row of the table of `compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jobs.run import Run
from jobs.verdicts.judge import Round, Verdict

# Verdicts that a table leaves out unless all are asked for
UNIMPORTANT = ("new", "gone", "not measured")


@dataclass(frozen=True, slots=True)
class Compared:
    """Comparison of two times, for one phase of a run on one kind of device."""

    run: Run
    device: str  # "" if unknown
    phase: str  # "" if the verdict is on the whole run, such as broken
    # faster, slower, same, unsure; broken, wrong, fixed, new, gone, not measured
    verdict: str
    baseline: str = ""  # label of the baseline of the run's block; "" without a block
    before: float | None = None  # time in ms
    after: float | None = None  # time in ms
    judged: Verdict | None = None  # that on the times, with their ratio; None: there is none
    detail: str = ""  # such as `oom`
    baseline_run: Run | None = None  # None: the baseline is the same run
    rounds: Sequence[Round] = ()  # those of a block with both times
    pending: bool = False  # whether a run that is not measured may still get a result

    @property
    def text(self) -> str:
        """The verdict and its detail, such as `broken, oom`."""
        return f"{self.verdict}, {self.detail}" if self.detail else self.verdict

    @property
    def is_important(self) -> bool:
        """Whether a table shows this cell even if not all cells are asked for."""
        return self.verdict not in UNIMPORTANT or self.pending
