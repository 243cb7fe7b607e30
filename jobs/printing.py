"""Prints the messages of workers and runs. A full disk or a closed stream must not end them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

NOTICE_S = 2.0  # a wait that takes longer is announced, in seconds
_waits: list[str] = []  # what is waited for now, the innermost last


def say(text: str, stream: TextIO | None) -> None:
    """Print a line to a stream, or nothing if that fails, e.g. if its file is on a full disk.

    Characters that the encoding of the stream does not have are written as escapes. What was
    printed to stdout before comes first.
    """
    # A benchmark may have closed the stream (ValueError, or None) or replaced it by any object.
    with suppress(AttributeError, OSError, ValueError):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        line = text.encode(encoding, "backslashreplace").decode(encoding)
        if stream is not None:
            if stream is sys.stderr and sys.stdout is not None:
                sys.stdout.flush()
            print(line, file=stream, flush=True)


@contextmanager
def waiting_for(what: str, how_to_stop: str = "Ctrl-C stops") -> Iterator[None]:
    """Print what is waited for, if the `with` block takes longer than NOTICE_S.

    Of several such blocks in each other, the innermost says so.
    """

    def tell() -> None:
        if _waits[-1:] == [what]:
            say(f"waiting for {what}; {how_to_stop}", sys.stderr)

    notice = threading.Timer(NOTICE_S, tell)
    notice.daemon = True
    notice.start()
    _waits.append(what)
    try:
        yield
    finally:
        _waits.pop()
        notice.cancel()
