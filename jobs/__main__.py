"""`python -m jobs COMMAND ...`: all commands. `python -m jobs --help` lists them."""

from __future__ import annotations

from jobs.cli.main import main

if __name__ == "__main__":
    main("python -m jobs")
