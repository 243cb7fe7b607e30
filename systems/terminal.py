"""Output and interrupts of the commands of this project.

A command calls `exit_on_interrupt` before its imports and `run_command` after them:

    if __name__ == "__main__":
        from systems.terminal import exit_on_interrupt
        exit_on_interrupt()
    ...
    if __name__ == "__main__":
        run_command(main)

Ctrl-C then ends the command with exit code 130 and without a traceback, also during imports. If
the reader of a pipe exits, as in `python -m jobs status | head`, the command ends without a message
and with exit code 141, as commands that SIGPIPE ends. If the output cannot be written for another
reason, e.g. to a file on a full disk, the command ends with one line on stderr and exit code 2.
Characters that the encoding of the output does not have are written as escapes such as \\u2026.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 128 + signal.SIGINT
CLOSED_PIPE = 128 + signal.SIGPIPE
UNWRITABLE = 2


def exit_on_interrupt() -> None:
    """Make Ctrl-C end this process at once with exit code 130, unless it ignores SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def _exit(signum: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def run_command(main: Callable[[], Any]) -> NoReturn:
    """Call the main function of a command, which may raise SystemExit, and exit with its code.

    Ctrl-C raises KeyboardInterrupt in it.
    """
    sys.stdout, sys.stderr = _output(sys.stdout), _output(sys.stderr)
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            main()
        finally:
            exit_on_interrupt()  # at the exit of the interpreter, Ctrl-C would print a traceback
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(0)


@contextmanager
def outliving_output(note: str) -> Iterator[None]:
    """Continue if stdout or stderr cannot be written while the `with` block runs.

    Causes are a pipe whose reader has exited, a full disk or a closed terminal. Without stdout,
    `note` is printed to stderr.
    """
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, _Output)]
    for stream in streams:
        stream.note = note
    try:
        yield
    finally:
        for stream in streams:
            stream.note = None


class _Output(io.TextIOWrapper):
    """Stream for stdout or stderr that handles failed writes and characters it cannot encode."""

    note: str | None = None  # if set, a failed write does not end the process

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._on_failure(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._on_failure(error)

    def _on_failure(self, error: OSError) -> None:
        """Discard this and all later output. End the process, unless there is a note to print."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())  # what is still in buffers goes there, too
        os.close(null)
        if self.note is None and error.errno == errno.EPIPE:
            raise SystemExit(CLOSED_PIPE)
        why = f"cannot write the output: {error.strerror}"
        if self is sys.stdout:
            print(self.note or why, file=sys.stderr)
        if self.note is None:
            raise SystemExit(UNWRITABLE)


def _output(stream: Any) -> Any:
    """Return an `_Output` for a stream, or the stream if it is closed or has no file."""
    if type(stream) is not io.TextIOWrapper:
        return stream
    stream.flush()
    return _Output(
        stream.buffer,
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
