"""Types of values that several keys of a sweep file have."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

Scalar = bool | int | float | str | None
Positive = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)
