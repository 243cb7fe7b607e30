"""The data of a picture of a run, as a JSON file among its artifacts.

`aggregate.py --plot` and the report draw them. They are read with the models of this module,
because a results folder can come from anybody.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

SUFFIX = ".plot.json"  # of file names
MAX_POINTS = 600  # maximum number of x values of a `Stack`
_Numbers = list[float]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Interval(_Model):
    """A named interval on the x axis, such as a phase."""

    name: str
    start: float
    end: float


class Stack(_Model):
    """Values that add up, such as the memory in use by kind, over x."""

    kind: Literal["stack"] = "stack"
    title: str
    x_title: str
    y_title: str
    x: _Numbers
    layers: dict[str, _Numbers]  # one value per x, by name, from the bottom to the top
    phases: list[Interval]

    @model_validator(mode="after")
    def _one_value_per_x(self) -> Self:
        for name, values in self.layers.items():
            if len(values) != len(self.x):
                raise ValueError(f"layer {name!r} has {len(values)} values for {len(self.x)} x")
        return self


class Spans(_Model):
    """Time spans in rows, such as the communication and the computation of each rank."""

    kind: Literal["spans"] = "spans"
    title: str
    x_title: str
    # Start and end of each span, by name of the row (from top to bottom) and class of the span.
    rows: dict[str, dict[str, list[tuple[float, float]]]]


Figure = Annotated[Stack | Spans, Field(discriminator="kind")]
_FIGURE: TypeAdapter[Stack | Spans] = TypeAdapter(Figure)


def write_figure(figure: Stack | Spans, path: Path) -> None:
    """Write the data of a figure as JSON."""
    path.write_text(figure.model_dump_json() + "\n")


def read_figure(path: Path) -> Stack | Spans:
    """Read the data of a figure.

    Raises:
        ValueError: if the file is not valid JSON, or not the data of a figure.
    """
    return _FIGURE.validate_json(path.read_bytes())
