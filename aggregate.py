"""`python aggregate.py FOLDER` prints the tables of a results folder: the command tables."""

from __future__ import annotations

from jobs.cli.main import main

if __name__ == "__main__":
    main("python aggregate.py", default="tables")
