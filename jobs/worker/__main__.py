"""Run a job of a submission: `python -m jobs.worker DIR/submissions/ID INDEX`.

DIR is the results folder, ID the id of the submission, and INDEX the index of a job. The local
queue starts this command. A Slurm job runs `jobs.launch.worker_task` instead.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from jobs.results.manifest import read_manifest
from jobs.worker.fork_server import adopt_orphans, die_with_parent
from jobs.worker.worker import Worker


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jobs.worker", description=__doc__)
    parser.add_argument("submission", type=Path)
    parser.add_argument("index", type=int)
    parser.add_argument("--parent", type=int, help="pid of the parent; stop when the parent exits")
    given = parser.parse_args(arguments)
    adopt_orphans()  # those of a fork server that was killed
    worker = Worker(read_manifest(given.submission), given.index)
    worker.handle_term()
    if given.parent is not None:
        die_with_parent(given.parent, signal.SIGTERM)
    worker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
