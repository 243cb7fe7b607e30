"""Type of a benchmark parameter that selects an implementation.

The value is the name of an implementation of this project, or a reference to an implementation
outside this project, such as `my_kernels/flash.py:MyFlash`:

    class Params(BenchmarkParams):
        strategy: Annotated[str, Implementation("ddp", ("naive", "flat"))]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from systems.external.reference import BadReference, Reference, is_reference
from systems.external.source import check_source

# Key of a validation context. If it is true, the parameters come from a record, and the source of
# the implementation is not checked. It may have been changed or removed since.
STORED = "stored"


@dataclass(frozen=True)
class Implementation:
    """Validator of a parameter that selects an implementation, for `Annotated[str, ...]`.

    The kind is a key of `systems.external.source.KINDS`, and names are those of this project.
    """

    kind: str
    names: tuple[str, ...]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str, info: ValidationInfo) -> str:
        if value in self.names or (info.context or {}).get(STORED):
            return value
        if not is_reference(value):
            valid = ", ".join(map(repr, self.names))
            raise PydanticCustomError(
                "implementation",
                "{expected}, or your own as FILE.py:NAME or PACKAGE.MODULE:NAME",  # type: ignore[arg-type]
                {"expected": valid},
            )
        try:
            reference = Reference.parse(value)
            check_source(reference, self.kind)
        except BadReference as error:
            raise PydanticCustomError("reference", "{why}", {"why": str(error)}) from None
        return str(reference)
