"""Check that two versions of this project print the same for all tracked results.

python scripts/golden.py BEFORE [AFTER] [--work DIR]

BEFORE and AFTER are git revisions or folders; AFTER is by default the working tree. Compared are
the tables, attempts, comparisons, exports and the report of all folders in logs/, the states of
their runs, and the runs and ids of all stock sweeps. The files of each version are copied to DIR
(by default a new temporary folder), where all outputs stay.

A version of code in which modules moved computes other source hashes, and then all results would
be of older code. Therefore the results that are of present code in BEFORE are made so in AFTER.

Exit code: 0 if all outputs are equal, 1 if some differ.
"""

from __future__ import annotations

import argparse
import filecmp
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
# In the sbatch scripts of a dry run
NEW_SUBMISSION = r"(submissions/|sweep:)\d{8}-\d{6}-\d+-\w{4}(?=/slurm|/jobs|\.| )"
WARM_UP = [
    "aggregate",
    "jobs.cli.tables",
    "pandas",
    "scipy.stats",
    "matplotlib.figure",
    "typer",
    "pydantic",
]
# Executes commands, each in a process that has the modules already, and saves what they print.
RUN_ALL = """
import json, os, runpy, sys
sys.path.insert(0, os.getcwd())
for name in sys.argv[1:]:
    try: __import__(name)
    except ImportError: pass
for output, command in json.load(sys.stdin):
    child = os.fork()
    if not child:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.argv = command
        try:
            if command[0] == "-c": exec(command[1])
            elif command[0].endswith(".py"): runpy.run_path(command[0], run_name="__main__")
            else: runpy.run_module(command[0], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as exit: code = exit.code
        sys.stdout.flush()
        os.write(1, f"exit code {code or 0}\\n".encode())
        os._exit(0)
    os.waitpid(child, 0)
"""


# Prints the id and the parameters of each run of a sweep. A dry run shows only the first ones.
IDS = """
from pathlib import Path
from jobs.sweep.expand import expand
from jobs.sweep.load import load_sweep
for run in expand(load_sweep(Path({sweep!r}))).runs: print(run.id, run.label())
"""

# Prints the id of each run of a results folder, and the hash of the sources that it has now.
HASHES = """
import sys
from pathlib import Path
from jobs.results.run_states import observe
from jobs.sweep.run_sources import RunSources
sources = RunSources()
for manifest in observe(Path(sys.argv[1]).resolve()).manifests:
    for run in manifest.runs.values(): print(run.id, sources.source_hash(run))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", help="git revision, or folder")
    parser.add_argument("after", nargs="?", default=str(ROOT), help="default: the working tree")
    parser.add_argument("--work", type=Path, help="new folder for the copies and all outputs")
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="golden-")) if arguments.work is None else arguments.work
    if work.is_dir() and any(work.iterdir()):
        raise SystemExit(f"--work must be a new or an empty folder, got {work}")
    before, after = (work.resolve() / name for name in ("before", "after"))
    copy_version(arguments.before, before)
    copy_version(arguments.after, after)
    make_equally_old(before, after)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write_outputs, (before, after)))
    for path in (before / "out").glob("*.txt"):
        if "Traceback" in path.read_text():
            raise SystemExit(f"a command failed: {path}")
    different = compare(before / "out", after / "out")
    for name in different:
        print(f"differs: diff {before / 'out' / name} {after / 'out' / name}")
    count = sum(path.is_file() for path in (before / "out").rglob("*"))
    print(f"{count} outputs, {len(different)} differ; in {work}")
    raise SystemExit(1 if different else 0)


def copy_version(version: str, target: Path) -> None:
    """Copy the files of a revision, or the files of a folder that git does not ignore."""
    target.mkdir(parents=True)
    if not Path(version).is_dir():
        known = ["git", "rev-parse", "--quiet", "--verify", f"{version}^{{commit}}"]
        if subprocess.run(known, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(f"neither a folder nor a git revision: {version!r}")
        command = ["git", "archive", "--format=tar", version]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as archive:
            subprocess.run(["tar", "-x", "-C", target], stdin=archive.stdout, check=True)
        return
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listed, cwd=version, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"{version}: {found.stderr.strip()}")
    for name in filter(None, found.stdout.split("\0")):
        source = Path(version, name)
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / name)


def results_folders(version: Path) -> list[str]:
    found = (path.parent for path in version.glob("logs/*/*/submissions"))
    return sorted(str(path.relative_to(version)) for path in found)


def make_equally_old(before: Path, after: Path) -> None:
    """Give records in `after` the present hash if they are of present code in `before`."""
    with ThreadPoolExecutor(2) as threads:
        then, now = threads.map(source_hashes, (before, after))
    for folder in results_folders(after):
        for path in (after / folder / "records").glob("*.jsonl.gz"):
            path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
            path.unlink()
        for path in (after / folder / "records").glob("*.jsonl"):
            path.write_text("".join(map(partial(_renewed, then, now), path.open())))


def _renewed(then: dict[str, str], now: dict[str, str], line: str) -> str:
    run = re.search(r'"run": ?"(\w+)"', line)
    source_hash = re.search(r'"source_hash": ?"(\w+)"', line)
    if run is None or source_hash is None or then.get(run[1]) != source_hash[1]:
        return line
    renewed = now.get(run[1], "unknown")
    return line.replace(source_hash[0], source_hash[0].replace(source_hash[1], renewed))


def source_hashes(version: Path) -> dict[str, str]:
    """Return the present source hash of each run in the results folders of a version."""
    lines: list[str] = []
    for folder in results_folders(version):
        command = [sys.executable, "-c", HASHES, folder]
        lines += subprocess.run(
            command, cwd=version, check=True, capture_output=True, text=True
        ).stdout.splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


def write_outputs(version: Path) -> None:
    """Execute all commands with the code of a version. What they print is written to `out`."""
    out = version / "out"
    out.mkdir()
    commands = commands_of(version)
    environment = os.environ | {"COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-c", RUN_ALL, *WARM_UP],
        cwd=version,
        check=True,
        env=environment,
        input=json.dumps([(str(out / f"{name}.txt"), command) for name, command in commands]),
        text=True,
    )
    for path in out.rglob("*"):
        if path.suffix in (".txt", ".md", ".html", ".csv"):
            text = path.read_text().replace(str(version), "ROOT")
            text = re.sub(NEW_SUBMISSION, r"\1NEW", text)
            path.write_text(re.sub(" +$", "", text, flags=re.M))


def commands_of(version: Path) -> list[tuple[str, list[str]]]:
    """Return the name and the arguments of each command, the longest first."""
    folders = results_folders(version)
    commands = [
        ("report", ["aggregate.py", "report", "logs", "--out", "out/report"]),
        ("export", ["aggregate.py", "export", *folders]),
    ]
    for folder in folders:
        name = folder.replace("/", "-")
        commands += [
            (f"{name}-tables", ["aggregate.py", folder]),
            (f"{name}-csv", ["aggregate.py", folder, "--format", "csv"]),
            (f"{name}-attempts", ["aggregate.py", "attempts", folder]),
            (f"{name}-compare", ["aggregate.py", "compare", folder, "--all"]),
            (f"{name}-compare-csv", ["aggregate.py", "compare", folder, "--format", "csv"]),
            (f"{name}-status", ["jobs", "status", folder, "--json"]),
        ]
        other = folder.replace("logs/h100/", "logs/h200/")
        if other != folder and other in folders:
            both = ["aggregate.py", "compare", folder, other, "--all"]
            commands.append((f"{name}-compare-h200", both))
    for path in sorted(version.glob("sweeps/**/*.yaml")):
        sweep = str(path.relative_to(version))
        name = sweep.replace("/", "-")
        commands.append((name, ["jobs.submit", sweep, "--dry-run", "--sbatch"]))
        commands.append((f"{name}-ids", ["-c", IDS.format(sweep=sweep)]))
    return commands


def compare(before: Path, after: Path) -> list[str]:
    """Return the outputs that differ or that only one version has, relative to the folders."""
    paths = {p.relative_to(f) for f in (before, after) for p in f.rglob("*") if p.is_file()}
    equal = partial(filecmp.cmp, shallow=False)
    return sorted(
        str(path)
        for path in paths
        if not ((before / path).is_file() and (after / path).is_file())
        or not equal(before / path, after / path)
    )


if __name__ == "__main__":
    main()
