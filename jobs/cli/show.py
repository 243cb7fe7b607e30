"""The command `show`: one page about a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from jobs.cli.arguments import In, RunId
from jobs.cli.observed import found_run
from jobs.cli.output import columns, width
from jobs.errors import shown
from jobs.formatting import format_number, format_scalar, relative
from jobs.frame.metrics import METRICS, measured_phases, metric_samples, scalars
from jobs.frame.recorded import shown_commit
from jobs.frame.statistics import statistic
from jobs.processes import without_options
from jobs.report.attempts import attempt_columns, attempts_of
from jobs.report.tables.markdown import markdown_table
from jobs.results.manifest import ARTIFACTS, Manifest
from jobs.results.record import Record, is_without_code
from jobs.results.run_logs import job_logs, log_of, text_of
from jobs.results.run_states import Observation, TaskState
from jobs.status import Status

EXAMPLES = "3fa2 --in logs/flash"

LOG_LINES = 10  # number of lines at the end of the log that are shown
SHOWN_FACTS = 30  # maximum number of facts
# Columns of the attempts that this page shows elsewhere, and those that a narrow terminal lacks
_ELSEWHERE = {"run", "repeat", "device"}
_LEAST = (
    "why", "gpu", "triton", "torch", "threads", "round", "host", "commit", "started (UTC)", "shown",
)  # fmt: skip


def show(run: RunId, folder: In = None) -> None:
    """Show one page about a run.

    The page has its parameters, all attempts, the figures and the environment of its result, the
    end of its log, and how to repeat it. The result is that of a repeat that failed if there is
    one, otherwise of the repeat that finished last.
    """
    seen, task = found_run(run, folder)
    for section in _sections(seen, task):
        print(section, end="\n\n")


def _sections(seen: Observation, task: TaskState) -> Iterator[str]:
    record = task.outcome
    with_run = [manifest for manifest in seen.manifests if task.run.id in manifest.runs]
    of_record = [m for m in with_run if record is not None and m.id == record.submission]
    manifest = (of_record or with_run)[-1]
    yield "\n".join(_head(seen, task, manifest))
    attempts = [each for each in attempts_of(seen) if each.run.id == task.run.id]
    if attempts:
        cells = attempt_columns(seen, attempts)
        elsewhere = _ELSEWHERE if len(set(cells["repeat"])) == 1 else _ELSEWHERE - {"repeat"}
        yield _table("Attempts", {k: cells[k] for k in cells if k not in elsewhere})
    if record is not None and record.measurements is not None:
        figures = _figures(record)
        if len(figures) > 1:
            yield _table("Median over the samples of one process", figures)
        if facts := _facts(record.measurements.facts):
            yield "\n".join(["Facts", *facts])
    if record is not None:
        yield "\n".join(["Environment", *_environment(record)])
    path = log_of(seen, task) or next(iter(job_logs(seen, task)), None)
    if path is not None:
        lines = text_of(path).splitlines()
        rest = f", its last {LOG_LINES} of {len(lines)} lines" if lines[LOG_LINES:] else ""
        yield "\n".join([f"Log {relative(path)}{rest}", *map(shown, lines[-LOG_LINES:])])
    submitted = next((m.command for m in reversed(with_run) if m.is_submit), "")
    yield "\n".join(["To repeat it", *_again(seen, task, submitted)])


def _head(seen: Observation, task: TaskState, manifest: Manifest) -> Iterator[str]:
    run = task.run
    yield f"Run {run.id} of sweep {manifest.sweep.name} in {relative(seen.folder)}"
    older = " (measured with older code)" if task.key in seen.stale else ""
    if task.outcome is not None and is_without_code(task.outcome, seen.source_hashes):
        older = " (its code is not found from this folder)"
    why = task.failure.summary if task.failure else task.detail
    yield _line("state", f"{task.status}{older}" + (f": {why}" if why else ""))
    yield _line("benchmark", f"{run.benchmark}, version {run.version}")
    params = (f"{name}={format_scalar(value)}" for name, value in run.params.items())
    yield _line("parameters", " ".join(params))
    yield _line("resources", f"{run.shape}, at most {run.timeout_s:g} s")
    if run.checkout:
        yield _line("code", f"the checkout {run.checkout}")
    for left in sorted(seen.folder.glob(f"{ARTIFACTS}/{run.id}-{task.repeat}-*")):
        yield _line("artifacts", str(relative(left)))


def _figures(record: Record) -> dict[str, list[str]]:
    """Return a table of all metrics by phase."""
    assert record.measurements is not None
    phases = measured_phases(record.measurements) or [""]
    table = {"phase": phases}
    for metric in METRICS.values():
        found = [metric_samples(record, metric, phase) for phase in phases]
        measured = [None if isinstance(each, str) else each for each in found]
        if any(each is not None for each in measured):
            table[metric.header] = [
                "" if each is None else format_number(statistic(each, "median"))
                for each in measured
            ]
    return table


def _facts(facts: dict[str, Any]) -> list[str]:
    """Return a line for each fact that is a number or a short text."""
    flat = [
        (".".join(path), format_number(value) if isinstance(value, float) else format_scalar(value))
        for path, value in scalars(facts)
        if isinstance(value, float) or len(str(value)) <= 80
    ]
    more = [f"  … and {len(flat) - SHOWN_FACTS} more"] if flat[SHOWN_FACTS:] else []
    return [*columns(flat[:SHOWN_FACTS], "  ").splitlines(), *more]


def _environment(record: Record) -> Iterator[str]:
    about = record.environment
    uuids = ", ".join(str(gpu.get("uuid")) for gpu in record.gpus)
    yield _line("device", f"{record.device} ({uuids})" if uuids else record.device)
    yield _line("host", " ".join(str(about[k]) for k in ("host", "processor") if about.get(k)))
    if about.get("threads"):
        yield _line("threads", f"{about['threads']} (OMP_NUM_THREADS)")
    if record.slurm.get("job_id"):
        yield _line("Slurm job", record.slurm["job_id"])
    versions: dict[str, Any] = {"driver": about.get("driver")}
    versions |= (about.get("packages") or {}) | (about.get("loaded") or {})
    unknown = versions.pop("untested", None)
    yield _line("versions", ", ".join(f"{name} {each}" for name, each in versions.items() if each))
    if unknown:
        yield _line("untested", str(unknown))
    for state in (about.get("git") or {}, *(about.get("code") or ())):
        diff = f", diffs/{state['diff']}.diff" if state.get("diff") else ""
        of = f"{state['name']}: " if state.get("name") else ""
        yield _line("commit", f"{of}{shown_commit(state)}{diff}")


def _again(seen: Observation, task: TaskState, submitted: str) -> Iterator[str]:
    """Yield the commands that repeat a run. `submitted` is that of its submission, or ""."""
    place = shlex.quote(str(relative(seen.folder)))
    if not task.run.checkout and task.run.shape.nodes == 1:
        yield f"  python -m jobs replay {task.run.id} --in {place}    # here, in the foreground"
    option = "" if task.status.runs_again_on_submit else "--retry-failed"
    if task.status in (Status.ok, Status.unsupported):
        option = "--force"
    if submitted:
        words = [word for word in without_options(submitted, "--out") if word != option]
        command = shlex.join([*words, "--out", str(relative(seen.folder))])
        yield f"  {command} {option}".rstrip() + "    # its submission"


def _line(name: str, text: str) -> str:
    return f"  {name:12} {text}"


def _table(title: str, columns: dict[str, list[str]]) -> str:
    table = markdown_table(columns, width=width(), least=_LEAST, see="python -m jobs attempts")
    return f"{title}\n\n{table}"
