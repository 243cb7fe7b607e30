"""What workers decided about blocks with `rounds: auto`: a file in the folder of each job."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from jobs.results.unreadable import BadLine, read_json
from jobs.whole_files import write_json

FILE = "judgements.json"


class Judgement(BaseModel):
    """What the rounds of a block say. A cell is a candidate in one phase."""

    model_config = ConfigDict(frozen=True)

    rounds: int  # number of complete rounds
    cells: int
    undecided: list[str]  # what is not decided, such as the cell `1a2b3c4d forward`
    margin: float | None  # that of the sweep; None: the default
    phases: list[str]  # that must be decided; empty: all but sustained ones

    out_of_time: bool = False  # whether the worker ended because its job had no time for a round

    @property
    def is_decided(self) -> bool:
        return not self.undecided


_FILE = TypeAdapter(dict[str, Judgement])  # by block id


def write_judgement(job_folder: Path, block: str, judgement: Judgement) -> None:
    found = {**read_judgements(job_folder), block: judgement}
    write_json(job_folder / FILE, _FILE.dump_python(found, mode="json"))


def read_judgements(job_folder: Path, bad: list[BadLine] | None = None) -> dict[str, Judgement]:
    """Return the judgements on the blocks of a job, by block id."""
    return read_json(job_folder / FILE, _FILE, bad) or {}
