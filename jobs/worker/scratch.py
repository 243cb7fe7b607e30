"""The scratch folder of a run on a node: what its processes leave there, and the worker reads."""

from __future__ import annotations

import faulthandler
import os
import sys
from contextlib import suppress
from pathlib import Path

from jobs.printing import say
from jobs.status import Status
from jobs.worker.fork_server import DUMP_STACKS
from jobs.worker.isolation import Child, oom_kills
from jobs.worker.messages import AgentReport, Message, NodeReport, Outcome, Request
from jobs.worker.outcome import failed

STACKS_BYTES = 16000  # maximum length of the stacks of a run, in characters
LOG_END = 2000  # number of bytes at the end of a log that are copied into a failure
AGENT = "agent.json"  # file of the `AgentReport`
_UNDELIVERED = "undelivered-"  # prefix of the file whose name has the number of an error
_SERVER_DIED = (
    "the fork server, the parent of this run's process, ended unexpectedly; see the job's log, "
    "and submit the sweep again to repeat the run"
)


def no_scratch(error: OSError) -> Outcome:
    """Return the outcome of a run whose scratch folder cannot be created."""
    return _full(f"cannot create a temporary folder: {error}")


def _full(why: str) -> Outcome:
    """Return an outcome after which the same command repeats the run."""
    message = f"{why}; set TMPDIR to a folder with free space, and submit the sweep again"
    return failed(Status.killed, "NoScratch", message)


def outcome_file(scratch: str | Path, rank: int = 0) -> Path:
    return Path(scratch, f"outcome{rank}.json")


def deliver(message: Message, path: Path) -> bool:
    """Write a message to a file in the scratch folder, and return whether that worked."""
    try:
        message.write(path)
    except OSError as error:  # e.g. a full disk
        leave_error(path.parent, error)
        return False
    return True


def leave_error(scratch: Path, error: OSError) -> None:
    """Leave the number of an error in the name of an empty file, which needs no data block."""
    with suppress(OSError):
        (scratch / f"{_UNDELIVERED}{error.errno}").touch()
    say(f"cannot write to {scratch}: {error.strerror}", sys.stderr)


def watch_stacks(path: Path) -> None:
    """Make this process write the stacks of its threads to a file at a crash or on DUMP_STACKS."""
    try:
        file = path.open("w")
    except OSError as error:  # e.g. no free inode: go on without stacks
        say(f"cannot write stacks to {path}: {error.strerror}", sys.stderr)
        return
    faulthandler.register(DUMP_STACKS, file=file, all_threads=True)
    faulthandler.enable(file=file, all_threads=True)


def collect(request: Request, kills: int, child: Child) -> NodeReport:
    """End a run on this node, and return the report about it. `kills` are from before the run."""
    exit_code = child.exit_code if child.ended else 0
    child.kill()
    scratch = Path(request.scratch)
    report, stacks, log_end = scratch / AGENT, _stacks_in(scratch), _log_end(request.log)
    unable = _undelivered(scratch)
    if exit_code is None and unable is None:
        unable = failed(Status.killed, "ServerDied", _SERVER_DIED, stacks or log_end)
    return NodeReport(
        exit_code=exit_code or 0,
        agent=AgentReport.read(report) if report.exists() else None,
        outcomes=outcomes_in(scratch),
        stacks=stacks,
        log_end=log_end,
        out_of_memory=oom_kills() > kills,
        unable=unable,
    )


def outcomes_in(scratch: Path) -> list[Outcome]:
    return [Outcome.read(path) for path in sorted(scratch.glob("outcome*.json"))]


def _undelivered(scratch: Path) -> Outcome | None:
    """Return the outcome of a run of which a process could not write to its scratch folder."""
    numbers = [path.name.removeprefix(_UNDELIVERED) for path in scratch.glob(f"{_UNDELIVERED}*")]
    if not numbers:
        return None
    why = os.strerror(int(numbers[0])) if numbers[0].isdigit() else "unknown error"
    return _full(f"cannot write its outcome to {scratch}: {why}")


def _stacks_in(scratch: Path) -> str:
    """Return about STACKS_BYTES characters of the stacks that the processes of a run wrote."""
    texts = {
        path.stem.removeprefix("stack"): path.read_text(errors="replace").strip()
        for path in sorted(scratch.glob("stack*.txt"), key=lambda path: (len(path.name), path.name))
    }
    texts = {name: text for name, text in texts.items() if text}
    ranks = {name: text for name, text in texts.items() if name.isdigit()}
    # torchrun's agent only waits for its ranks. Its stack is useful only if no rank wrote a stack.
    if not ranks or len(texts) == 1:
        return "".join(texts.values())[-STACKS_BYTES:]
    share = STACKS_BYTES // len(ranks)
    return "\n\n".join(f"[rank {name}] {text[-share:]}" for name, text in ranks.items())


def _log_end(path: str | None) -> str:
    """Return at most LOG_END bytes at the end of a log as text. Empty if it cannot be read."""
    try:
        with open(path or os.devnull, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LOG_END))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
