"""Lists the results in a results folder: one for each run, repeat and kind of device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from jobs.results.record import Measurements, Record
from jobs.results.run_states import Observation, TaskState
from jobs.run import Run, varying
from jobs.status import Status
from jobs.sweep.schema import PSEUDO

Key = tuple[Any, ...]  # identifies a row or column of a table: one value per dimension
MAX_REASONS = 5  # maximum number of reasons for missing records in the notes of a table


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one repeat of a run on one kind of device."""

    run: Run
    repeat: int
    device: str  # "" if unknown
    status: Status
    record: Record | None  # None if there is no record on this kind of device
    detail: str = ""  # why there is no record

    @property
    def measurements(self) -> Measurements | None:
        """Measurements of the record. None if there is no record, or if the run failed."""
        return self.record.measurements if self.record else None

    @property
    def failure_text(self) -> str:
        """Text for the cell of a failed or missing run, such as `OOM (41.2 GiB)` or `timeout`."""
        if self.status != "oom":
            return self.status
        failure = self.record.failure if self.record else None
        if failure is None or failure.memory == "host":
            return "OOM (host)"
        if failure.requested_bytes is None:
            return "OOM"
        # The run needs at least the allocated memory plus the allocation that failed.
        needed = failure.requested_bytes + (failure.allocated_bytes or 0)
        return f"OOM ({needed / 2**30:.1f} GiB)"

    def coordinate(self, dimension: str, phase: str = "", metric: str = "") -> Any:
        """Return the value of the result in one dimension of a table.

        Args:
            dimension: a parameter, or one of phase, value, device and repeat.
            phase: result for the dimension "phase".
            metric: result for the dimension "value".
        """
        if dimension in PSEUDO:
            own = {"phase": phase, "value": metric, "device": self.device, "repeat": self.repeat}
            return own[dimension]
        return self.run.params[dimension]


def list_results(observation: Observation) -> list[Result]:
    """Return the results of every repeat of every run.

    If the folder has records from several kinds of device, such as GPU models, there is one result
    for each kind of device. The result is the latest successful attempt on this kind of device. If
    no attempt was successful, it is the latest attempt. If there was no attempt, the result has no
    record. Its status is then `missing`, or the status of the job, such as `queued`.
    """
    best: dict[tuple[str, int, str], Record] = {}
    for record in observation.records:
        key = (record.run, record.repeat, record.device)
        if record.status == "ok" or key not in best or best[key].status != "ok":
            best[key] = record
    # A kind of device on which every run is unsupported does not count as measured.
    measured = {r.device: None for r in best.values() if r.status != "unsupported"}
    devices_of: dict[str, set[str]] = {}
    for record in best.values():
        devices_of.setdefault(record.run, set()).add(record.device)
    results = []
    for task in observation.tasks:
        own = devices_of.get(task.run.id, set())
        devices = [device for device in measured if device in own or _can_run_on(device, task)]
        if not devices:
            results.append(_as_observed(task, task.record.device if task.record else ""))
        for device in devices:
            here = best.get((task.run.id, task.repeat, device))
            if here is not None:
                results.append(Result(task.run, task.repeat, device, here.status, here))
            elif len(devices) == 1 or task.record is None:
                results.append(_as_observed(task, device))
            else:
                results.append(Result(task.run, task.repeat, device, Status.missing, None))
    return results


def _as_observed(task: TaskState, device: str) -> Result:
    return Result(task.run, task.repeat, device, task.status, task.record, task.detail)


def _can_run_on(device: str, task: TaskState) -> bool:
    """Return True if the run requests a device of this type (GPU or CPU)."""
    on_cpu = not task.run.shape.gpus_per_node
    return device.startswith("cpu:") == on_cpu


def distinguishing_dimensions(results: list[Result], dimensions: list[str]) -> list[str]:
    """Return additional dimensions that a table needs so that no two runs share a cell.

    A dimension is a parameter or the device.

    Args:
        results: the results of the table.
        dimensions: the dimensions that the table already has.
    """
    needed: list[str] = []
    if len({r.device for r in results if r.device}) > 1 and "device" not in dimensions:
        needed.append("device")
    known = [name for name in (*dimensions, *needed) if name not in ("phase", "value")]
    groups: dict[Key, dict[str, Run]] = {}
    for result in results:
        key = tuple(result.coordinate(name) for name in known)
        groups.setdefault(key, {})[result.run.id] = result.run
    for runs in groups.values():
        if len(runs) > 1:
            needed += [
                name for name in varying(list(runs.values())) if name not in (*dimensions, *needed)
            ]
    return needed[::-1]


def result_notes(results: list[Result], sampling: str = "") -> list[str]:
    """Return the notes below a table: devices, samples, and reasons for missing records.

    Args:
        results: the results of the table.
        sampling: a note on the samples, or "" for no such note.
    """
    devices = ", ".join(dict.fromkeys(result.device for result in results if result.device))
    first = "; ".join(text for text in (devices, sampling) if text)
    counts = Counter(
        f"{result.status}: {result.detail}"
        for result in results
        if not result.record and result.detail
    )
    reasons = [
        f"{reason} ({count} run{'s' if count > 1 else ''})"
        for reason, count in counts.most_common(MAX_REASONS)
    ]
    if len(counts) > MAX_REASONS:
        reasons.append(f"{len(counts) - MAX_REASONS} more reasons: see python -m jobs status")
    return [*([first] if first else []), *reasons]
