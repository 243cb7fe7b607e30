"""Test the project with each release of torch, and print a table of what passed.

    make test-versions                        all releases, in virtual environments in .venvs
    python scripts/test_versions.py 2.11 2.14 --venvs DIR

Each release gets a virtual environment of its own. The column `launcher` has the tests of commands,
sweeps, jobs and tables, `numeric` those of models and parallel wrappers on the CPU. `interpreted`
are the Triton kernels in Triton's interpreter, `emulator` the Hopper kernels in the emulator, and
`machine code` both compiled for sm_90. `compile-check` is `make compile-check`. The output of each
is a file in DIR. The exit code is 1 if a test of a tested release failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1]))  # import `jobs` of this checkout
from jobs.versions import TESTED

ROOT = Path(__file__).parents[1]
# Python for each release of torch. The last one is not tested yet.
PYTHONS = {"2.11": "3.11", "2.12": "3.12", "2.13": "3.12", "2.14": "3.13", "2.15": "3.13"}
NEXT = {"2.15": "3.9"}
DEFAULT = "not gpu and not slow and not exhaustive"
PYTEST = ("-m", "pytest", "-q", "-n", "3", "-p", "no:cacheprovider", "--depends", "all", "-m")
MACHINE_CODE = [
    f"tests/systems/kernels/test_{name}.py"
    for name in ("flash_hopper_machine_code", "flash_configurations", "adamw_kernel")
]
CHECKS = {
    "interpreted": (*PYTEST, DEFAULT, "tests/interpreted", "-k", "not flash_hopper"),
    "emulator": (*PYTEST, DEFAULT, "tests/interpreted", "-k", "flash_hopper"),
    "machine code": (*PYTEST, "not gpu and not exhaustive", *MACHINE_CODE),
    "compile-check": ("scripts/compile_check.py",),
    "numeric": (*PYTEST, DEFAULT, "tests/systems", *(f"--ignore={path}" for path in MACHINE_CODE)),
    "launcher": (*PYTEST, DEFAULT, "tests", "--ignore=tests/systems", "--ignore=tests/interpreted"),
}


def install(torch: str, triton: str, venv: Path) -> str:
    """Install the project with a torch and a Triton. Return the versions, or "failed: ERROR"."""
    python = str(venv / "bin/python")
    wanted = [f"torch=={torch}.*", f"triton=={triton}.*", "--editable", f"{ROOT}[test]"]
    shown = "import torch, triton; print(torch.__version__.split('+')[0], triton.__version__)"
    output = ""
    for command in (
        [f"python{PYTHONS[torch]}", "-m", "venv", str(venv)],
        [python, "-m", "pip", "install", "--quiet", "--upgrade", *wanted],
        [python, "-c", shown],
    ):
        try:
            done = run(command)
        except FileNotFoundError:
            return f"failed: no {command[0]}"
        lines = done.stdout.strip().splitlines() or [""]
        if done.returncode:
            errors = [line for line in lines if line.startswith("ERROR")]
            return f"failed: {(errors or lines)[-1]}"
        output = lines[-1]
    return output


def run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the root folder. `stdout` of the result has both of its outputs."""
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def check(name: str, python: Path, log: Path) -> str:
    """Run a check, and return how many of its tests passed, and failed."""
    interpreted = {"TRITON_INTERPRET": "1"} if name in ("interpreted", "emulator") else {}
    done = run([str(python), *CHECKS[name]], **interpreted)
    log.write_text(done.stdout)
    last = (done.stdout.splitlines() or [""])[-1]
    counts = re.findall(r"\d+ (?:passed|failed|error)", last)
    if done.returncode and not re.search("failed|error", " ".join(counts)):
        counts.append(f"failed with exit code {done.returncode}")
    return ", ".join(counts) or "passed"


def main() -> int:
    releases = TESTED | NEXT
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("torch", nargs="*", default=list(releases), help=", ".join(releases))
    parser.add_argument("--venvs", type=Path, default=ROOT / ".venvs", metavar="DIR")
    arguments = parser.parse_args()
    if unknown := set(arguments.torch) - set(releases):
        parser.error(f"unknown release {min(unknown)}; choose from {', '.join(releases)}")
    venvs = arguments.venvs.absolute()
    venvs.mkdir(parents=True, exist_ok=True)
    rows = []
    for torch in arguments.torch:
        venv = venvs / torch
        installed = install(torch, releases[torch], venv)
        row = [PYTHONS[torch], torch, releases[torch], installed]
        if not installed.startswith("failed"):
            for name in CHECKS:
                row.append(check(name, venv / "bin/python", venv / f"{name}.log"))
                print(f"torch {torch}: {name}: {row[-1]}", file=sys.stderr, flush=True)
        rows.append(row)
        print(f"torch {torch}: {installed}", file=sys.stderr, flush=True)
    print(tabulate(rows, ["Python", "torch", "Triton", "installs", *CHECKS], disable_numparse=True))
    tested = [row for row in rows if row[1] in TESTED]
    return int(any(re.search("failed|error", " ".join(row)) for row in tested))


if __name__ == "__main__":
    sys.exit(main())
