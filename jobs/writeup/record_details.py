"""What the document shows of a record: where, how and with which code it was measured."""

from __future__ import annotations

import shlex
from typing import Any

from jobs.formatting import format_number, format_scalar, format_utc, is_number, relative
from jobs.frame.metrics import slowest_rank
from jobs.frame.recorded import recorded_value
from jobs.frame.statistics import statistic
from jobs.results.record import Record
from jobs.writeup.studies import Study

_CONDITIONS = ("sm_clock_mhz", "power_w", "temperature_c", "throttle", "energy_j")


def details(study: Study, record: Record) -> dict[str, Any]:
    """Return what the document shows of a record, as JSON values. All texts are plain texts."""
    folder = str(relative(study.folder_of(record)))
    environment = record.environment
    older = " (older code)" if study.is_stale(record) else ""
    older = " (code not found)" if study.is_without_code(record) else older
    facts: dict[str, str] = {
        "study": study.name,
        "status": record.status + older,
        "device": record.device,
        "GPUs": ", ".join(str(gpu.get("uuid", "")) for gpu in record.gpus),
        "host": str(environment.get("host", "")),
        "commit": str(recorded_value(record, "commit")),
        "started": f"{format_utc(record.started_at)} UTC",
        "repeat, attempt": f"{record.repeat}, {record.attempt}",
        "block, round": f"{record.block.id}, {record.block.round}" if record.block else "",
        "failure": record.failure.summary if record.failure else "",
    }
    return {
        "run": record.run,
        "facts": {name: text for name, text in facts.items() if text},
        "params": " ".join(f"{name}={format_scalar(v)}" for name, v in record.params.items()),
        "samples": _samples(record),
        "conditions": _conditions(record),
        "replay": shlex.join(["python", "-m", "jobs", "replay", record.run, "--in", folder]),
    }


def _samples(record: Record) -> list[list[str]]:
    """Return one row per phase: name, samples, median, mean, minimum, maximum, deviation."""
    if record.measurements is None:
        return []
    rows = []
    for phase in record.measurements.samples_ms:
        times = slowest_rank(record.measurements, phase)
        numbers = [statistic(times, name) for name in ("median", "mean", "min", "max", "std")]
        rows.append([phase, str(len(times)), *map(format_number, numbers)])
    return rows


def _conditions(record: Record) -> list[list[str]]:
    """Return one row per phase: name, and clock, power, temperature, throttling and energy."""
    return [
        [phase, *(_condition(known.get(name)) for name in _CONDITIONS)]
        for phase, known in record.conditions.items()
    ]


def _condition(value: Any) -> str:
    """Return a condition as text: minimum / median / maximum, or the share of samples by reason."""
    if isinstance(value, list):
        return " / ".join(map(_condition, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_share(share)}" for name, share in value.items()) or "none"
    if value is None:
        return ""
    return format_number(value) if is_number(value) else str(value)


def _share(value: Any) -> str:
    return f"{value:.0%}" if is_number(value) else str(value)
