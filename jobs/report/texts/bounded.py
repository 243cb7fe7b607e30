"""Calls a function in a forked child process with limits on its CPU time and memory.

Expressions of a template can build strings of any length and loops without an end. The sandbox of
Jinja does not limit their cost.
"""

from __future__ import annotations

import os
import resource
import signal
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from jobs.processes import signal_name

CPU_S = 20  # limit of the CPU time of a child, in seconds
MEMORY_GB = 1  # limit of the memory that a child may use in addition to that of its parent, in GB


def call_bounded(work: Callable[[Callable[[Any], None]], None]) -> tuple[list[Any], str | None]:
    """Call a function in a forked child process.

    Its argument is a function that sends a message to this process. The result is the messages, and
    why the child ended before the function returned, or None if it returned.
    """
    ours, theirs = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            ours.close()
            _limit()
            work(theirs.send)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # skip exit handlers and buffers of the parent
    theirs.close()
    messages = []
    try:
        while True:
            messages.append(ours.recv())
    except (EOFError, OSError):  # OSError: the child was killed while it sent a message
        pass
    except BaseException:  # e.g. Ctrl-C
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        ours.close()
        status = os.waitpid(child, 0)[1]
    return messages, _reason(os.waitstatus_to_exitcode(status))


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + MEMORY_GB * 10**9
    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: CPU_S, resource.RLIMIT_CORE: 0}
    for kind, limit in limits.items():
        before, hard = resource.getrlimit(kind)
        given = [one for one in (before, hard, limit) if one != resource.RLIM_INFINITY]
        resource.setrlimit(kind, (min(given), hard))


def _reason(exit_code: int) -> str | None:
    if exit_code == 0:
        return None
    if exit_code == -signal.SIGXCPU:
        return f"takes more than {CPU_S} s of CPU time"
    if exit_code < 0:
        return f"ended the process that rendered it by {signal_name(-exit_code)}"
    return f"ended the process that rendered it with exit code {exit_code}"
