"""Arguments that several commands of `python -m jobs` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jobs.cli.completion import results_folders, run_ids
from jobs.cli.parsers import as_path, run_prefix

Folder = Annotated[
    Path | None,
    typer.Argument(
        help="Results folder. [default: the folder of the last accepted submission]",
        parser=as_path,
        autocompletion=results_folders,
    ),
]
AnyFolders = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FOLDER]...",
        help="Results folders, and folders that contain results folders. [default: ./logs]",
        parser=as_path,
        autocompletion=results_folders,
    ),
]
In = Annotated[
    Path | None,
    typer.Option(
        "--in",
        help="Results folder that contains the run. [default: search the folder of the last "
        "submission, then all folders in ./logs]",
        parser=as_path,
        autocompletion=results_folders,
    ),
]
RunId = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Id of a run, or its first characters, for example 3fa2. "
        "'python -m jobs status --json' lists the ids of all runs.",
        parser=run_prefix,
        autocompletion=run_ids,
    ),
]
