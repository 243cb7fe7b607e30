"""Prints the messages of workers and runs. A full disk or a closed stream must not end them."""

from __future__ import annotations

from contextlib import suppress
from typing import TextIO


def say(text: str, stream: TextIO | None) -> None:
    """Print a line to a stream. Do nothing if that fails, e.g. if its file is on a full disk.

    Characters that the encoding of the stream does not have are written as escapes. The text may
    contain line breaks. A closed stream is None.
    """
    if stream is None:
        return
    # A benchmark may have closed the stream (ValueError) or replaced it by any object.
    with suppress(AttributeError, OSError, ValueError):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        line = text.encode(encoding, "backslashreplace").decode(encoding)
        print(line, file=stream, flush=True)
