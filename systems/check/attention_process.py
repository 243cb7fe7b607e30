"""Run the checks of an attention function in a child process, which may crash, exit or hang.

The parent process sends the cases through a pipe and receives the results:

    python -m systems.check.attention_process FD        FD: file descriptor of the pipe
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch

from systems.check.attention import Case, check_attention
from systems.check.checked import Checked, one_line
from systems.external.loading import load
from systems.external.reference import is_reference

START_S = 300.0  # maximum time until the code is imported, in seconds
LAST_CASE_S = 60.0  # time that the last case may take after the time budget, in seconds
MAX_DEATHS = 3  # number of child processes that may die before the check ends


class NotImportable(Exception):
    """Raised if the code cannot be imported. The message is the reason in one line."""


def check_in_child(
    reference: str, grid: list[Case], on_gpu: bool, budget_s: float
) -> Iterator[Checked]:
    """Check an attention function in a child process, and yield the result of each case.

    If the child process dies, the case is refused, and a new child process checks the other cases.
    After `budget_s` seconds, no other case starts. A case that is not finished a minute later is
    refused. The reference is such as `my_kernels/flash.py:MyFlash`, or a name of this project.

    Raises:
        NotImportable: if the code cannot be imported.
    """
    left, end, deaths = list(grid), time.monotonic() + budget_s, 0
    while left and deaths < MAX_DEATHS:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        # Triton reads the variable when it is imported.
        environment = os.environ | ({} if on_gpu else {"TRITON_INTERPRET": "1"})
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment) as child:
            theirs.close()
            try:
                ours.send((reference, left, on_gpu, max(0.0, end - time.monotonic())))
                for checked in _received(ours, end):
                    left.pop(0)
                    yield checked
                return
            except TimeoutError:
                why = f"not finished when the check ended after {budget_s + LAST_CASE_S:.0f} s"
                yield Checked(left[0], refused=why, crashed=True)
                return
            except (EOFError, ConnectionError):
                why = f"the process ended with exit code {child.wait()}"
                yield Checked(left.pop(0), refused=why, crashed=True)
                deaths += 1
            finally:
                ours.close()
                child.kill()


def _received(connection: Connection, end: float) -> Iterator[Checked]:
    """Yield the results that a child process sends, until it has sent all of them.

    Raises NotImportable, TimeoutError without an answer in time, or EOFError if the process has
    ended.
    """
    if not connection.poll(START_S):
        raise NotImportable(f"the import did not end within {START_S:.0f} s")
    why = connection.recv()
    if why is not None:
        raise NotImportable(why)
    while True:
        if not connection.poll(max(0.0, end - time.monotonic()) + LAST_CASE_S):
            raise TimeoutError
        checked = connection.recv()
        if checked is None:
            return
        yield checked


def _run(connection: Connection) -> None:
    """Check the cases that the parent process sends, and send the results."""
    reference, grid, on_gpu, budget_s = connection.recv()
    try:
        if is_reference(reference):
            load(reference)
    except BaseException as error:  # also SystemExit
        connection.send(one_line(error))
        return
    # torch prints it when the first matmul of a process is in backward.
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA")
    connection.send(None)
    device = torch.device("cuda" if on_gpu else "cpu")
    for checked in check_attention(reference, grid, device, budget_s):
        connection.send(checked)
    connection.send(None)


if __name__ == "__main__":
    _run(Connection(int(sys.argv[1])))
