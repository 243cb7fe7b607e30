"""The problems that the document answers: questions, exhibits and templates of the answers.

Each file in the folder `problems` is one problem of CS336, assignment 2, or one study beyond it.
The file names give the order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

FOLDER = Path(__file__).parent / "problems"
Edition = Literal[2025, 2026]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Anchor = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Exhibit(_Model):
    """A table or plot that a sweep declares, or the figures that its runs have drawn."""

    table: str | None = None
    plot: str | None = None
    images: str | None = None  # file name of the figures, without suffix
    sweep: str | None = None  # None: that of the part
    where: str | None = None  # condition on the runs that it shows

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [name for name in ("table", "plot", "images") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"an exhibit is one of table, plot and images, got {given or 'none'}")
        return self


class Part(_Model):
    """One question of a problem and the template of its answer."""

    part: str = ""  # letter; "" if the problem has one part
    question: str
    sweep: str | None = None  # None: that of the problem
    filter: str | None = None  # condition that selects the runs of this part
    override: str | None = None  # KEY=VALUE with which this part submits the sweep
    show: list[Exhibit] = []
    more: list[str] = []  # tables that are folded away
    whole: bool = False  # whether a page opens with the whole answer, and not its first paragraph
    # Expressions of Jinja2 by name, which may use the names before them. A mapping is a dict.
    numbers: dict[Name, str | dict[str, Any]] = {}
    answer: str  # Markdown with the names of `numbers`, see jobs.writeup.answer


class Problem(_Model):
    """A problem with its parts."""

    id: Anchor
    title: str
    names: dict[Edition, str] = {}  # name of the problem in each edition; {}: beyond the assignment
    sweep: str | None = None  # None: the answers need no records
    parts: Annotated[list[Part], Field(min_length=1)]

    @property
    def anchors(self) -> list[str]:
        """The id, followed by the names of the editions that differ from it."""
        return list(dict.fromkeys([self.id, *self.names.values()]))

    @property
    def names_text(self) -> str:
        """The names in the editions of the assignment, such as `2025 and 2026: name`."""
        by_name: dict[str, list[str]] = {}
        for edition, name in self.names.items():
            by_name.setdefault(name, []).append(str(edition))
        return "; ".join(f"{' and '.join(years)}: {name}" for name, years in by_name.items())


def read_problems(folder: Path = FOLDER) -> list[Problem]:
    """Read all problems of a folder, in the order of the file names.

    Raises:
        ValueError: if a file is not valid.
    """
    problems = []
    for path in sorted(folder.glob("*.yaml")):
        try:
            problems.append(Problem.model_validate(yaml.safe_load(path.read_text())))
        except (yaml.YAMLError, ValidationError) as error:
            raise ValueError(f"{path.name}: {error}") from error
    return problems
