"""`python -m jobs.submit SWEEP [KEY=VALUE]...` submits a sweep: the command submit."""

from __future__ import annotations

from jobs.cli.main import main

if __name__ == "__main__":
    main("python -m jobs.submit", default="submit")
