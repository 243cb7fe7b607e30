"""Measure the overhead of the launcher: expanding, running, submitting and tabulating a sweep.

    python scripts/bench_launcher.py [--records 100000]

Prints one line per measurement, with its target. Submission is measured only if Slurm is available.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


# Linux counts the memory of the process that starts a command as memory of the command. A small
# process therefore starts it.
_WRAPPER = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
with open(sys.argv[1], "w") as file:
    json.dump([status, usage.ru_maxrss], file)
"""


def command(*arguments: str, exit_code: int = 0) -> tuple[float, int]:
    """Run a command; return its wall time in seconds and its peak resident memory in bytes.

    Args:
        exit_code: the exit code that the command must have.

    Raises:
        SystemExit: if the command has another exit code. The message contains its output.
    """
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output, tempfile.NamedTemporaryFile("r") as usage:
        wrapped = [sys.executable, "-c", _WRAPPER, usage.name, *arguments]
        subprocess.run(wrapped, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=True)
        seconds = time.perf_counter() - start
        status, kilobytes = json.load(usage)
        output.seek(0)
        code = os.waitstatus_to_exitcode(status)
        if code != exit_code:
            told = f"{' '.join(arguments)} failed with exit code {code}"
            raise SystemExit(f"{told}:\n{output.read()}")
    return seconds, kilobytes * 1024


def submit(*arguments: str) -> float:
    """Run `python -m jobs.submit`, and return its wall time in seconds."""
    return command(sys.executable, "-m", "jobs.submit", *arguments)[0]


def sweep(path: Path, **more: Any) -> Path:
    """Write a sweep file for the benchmark `attention` with the keys in `more`. Return its path."""
    path.write_text(json.dumps({"benchmark": "attention"} | more))  # JSON is valid YAML
    return path


def expansion(folder: Path) -> None:
    """Measure the time of a dry run of a sweep with 10,000 runs."""
    grid = {"seq_len": list(range(1, 101)), "head_dim": list(range(1, 101))}
    path = sweep(
        folder / "expansion.yaml", name="expansion", fixed={"implementation": "naive"}, grid=grid
    )
    seconds = submit(str(path), "--dry-run", "--local", "--out", str(folder / "expansion"))
    print(f"dry run of 10,000 runs: {seconds:.2f} s (target: 2 s)")


def packed_run(folder: Path) -> None:
    """Measure the overhead per run in one job with 40 very short runs."""
    path = sweep(
        folder / "packed.yaml",
        name="packed",
        fixed={"implementation": "sdpa_math", "seq_len": 1, "head_dim": 1, "dtype": "fp32",
               "warmup_ms": 0.01, "measure_ms": 0.01},
        grid={"seed": list(range(40))},
        runs_per_job=100,
    )  # fmt: skip
    out = folder / "packed"
    submit(str(path), "--local", "--out", str(out))
    from jobs.results.record_reader import read_records

    records = read_records(out)[0]
    records.sort(key=lambda record: record.started_at)
    starting = sorted(record.seconds.starting or 0 for record in records)
    each = (records[-1].finished_at - records[0].finished_at) / (len(records) - 1)
    inside = sorted(record.seconds.measuring or 0 for record in records)[len(records) // 2]
    middle, first = starting[len(starting) // 2], starting[-1]
    print(
        f"packed runs: {each:.3f} s per run, of which {each - inside:.3f} s overhead (target: well "
        f"under 1 s); start-up before run(): median {middle:.3f} s, maximum {first:.1f} s"
    )


def submission(folder: Path) -> None:
    """Measure the time to submit 1,000 jobs of one run each to Slurm. Then cancel the jobs."""
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], capture_output=True).returncode:
        print("submission of 1,000 runs: not measured, because sinfo is missing or fails")
        return
    path = sweep(
        folder / "submission.yaml",
        name="submission",
        fixed={"implementation": "naive", "head_dim": 1},
        grid={"seq_len": list(range(1, 1001))},
        slurm={"array_parallelism": 1},
    )
    out = folder / "submission"
    seconds = submit(str(path), "--out", str(out))
    command(sys.executable, "-m", "jobs", "cancel", str(out))
    print(f"submission of 1,000 runs, one run per job: {seconds:.1f} s")


def write_results(out: Path, count: int, seed: int = 0) -> int:
    """Write a results folder with `count` records, as after one submission. Return its runs.

    Each record has three phases with 100 samples each. Each file contains 1,000 records. `count` is
    rounded down to a multiple of 100.

    Args:
        out: the results folder. It must not exist.
    """
    from jobs.launch.packing import pack
    from jobs.launch.resume import tasks_of
    from jobs.results.manifest import Executor, Manifest, new_id, write_manifest
    from jobs.results.record import RECORDS, Measurements, Record
    from jobs.sweep.expand import expand
    from jobs.sweep.load import load_sweep

    out.parent.mkdir(parents=True, exist_ok=True)
    path = sweep(
        out.with_suffix(".yaml"),
        name="aggregation",
        fixed={"implementation": "naive"},
        grid={"seq_len": list(range(1, count // 100 + 1)), "head_dim": list(range(1, 101))},
        runs_per_job=1000,
        tables=[{"name": "t", "rows": ["seq_len"], "columns": ["head_dim"], "phase": "forward"}],
    )
    loaded = load_sweep(path)
    expanded = expand(loaded)
    runs = {run.id: run for run in expanded.runs}
    jobs = pack(tasks_of([*runs], 1), runs, 1000)
    manifest = Manifest(
        out, new_id(), time.time(), Executor.local, loaded.sweep, "", "", runs, jobs, [], {}
    )
    write_manifest(manifest)
    draw = random.Random(seed)
    environment = {"host": "n1", "packages": {"torch": "2.11.0"}, "git": {"commit": "0" * 40}}
    lines: dict[int, list[bytes]] = {}
    for job in jobs:
        for run_id, repeat in job.tasks:
            run = runs[run_id]
            samples = {
                phase: [round(draw.gauss(1, 0.05), 6) for _ in range(100)]
                for phase in ("forward", "backward", "forward_backward")
            }
            record = Record(
                run=run_id, repeat=repeat, attempt=1, status="ok", sweep="aggregation",
                submission=manifest.id, job=job.index, benchmark="attention", version=run.version,
                params=run.params, device="NVIDIA H200", started_at=1.0, finished_at=2.0,
                measurements=Measurements(samples_ms=samples), environment=environment,
            )  # fmt: skip
            line = record.model_dump_json(exclude_none=True).encode()
            lines.setdefault(job.index, []).append(line)
    records = out / RECORDS
    records.mkdir()
    for index, many in lines.items():
        (records / f"{manifest.id}-{index}.jsonl").write_bytes(b"\n".join(many) + b"\n")
    return len(runs)


def aggregation(folder: Path, count: int) -> None:
    """Measure the tables of a results folder with `count` records, and a comparison of two."""
    before, after = folder / "before", folder / "after"
    runs = write_results(before, count)
    write_results(after, count, seed=1)
    size = sum(file.stat().st_size for file in before.glob("records/*"))
    usual, file = "10 s, 1 GB", folder / "all.csv"
    for what, target, exits, *arguments in (
        (f"tables of {runs:,} records ({size / 1e6:.0f} MB)", usual, 0, str(before)),
        (
            f"comparison of two folders with {runs:,} records",
            "30 s, 2.5 GB",
            3,
            "compare",
            before,
            after,
        ),
        (f"export of {runs:,} records to CSV", "15 s, 1.5 GB", 0, "export", before, "--out", file),
    ):
        seconds, peak = command(
            sys.executable, "aggregate.py", *map(str, arguments), exit_code=exits
        )
        print(
            f"{what}: {seconds:.1f} s, peak memory {peak / 1e9:.2f} GB "
            f"(target for 100,000 records: {target})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=100_000)
    count = parser.parse_args().records
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        expansion(folder)
        packed_run(folder)
        submission(folder)
        aggregation(folder, count)


if __name__ == "__main__":
    main()
