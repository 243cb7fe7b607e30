"""Bad command lines of `jobs.submit`: overrides, options and cluster files."""

from __future__ import annotations

import os
from pathlib import Path

from tests.jobs.bad_input.case import HEAD, ONE, PLAN, Case, Content

GRID = HEAD + "grid: {size: [1, 2]}\ncases: [{fixed: {mode: fast}}]\n"
MIXED = HEAD + ONE + "cases: [{}, {benchmark: tests.benchmarks.counter}]\n"
# tests/jobs/sweep/test_overrides.py has the other kinds of wrong overrides.
_OVERRIDES = [
    (["size"], "command line: size: expected key=value"),
    (["size=large"], "size: got 'large'"),
    (["size=1\0"], "U+0000"),
    (["size=\udcff"], "size=\\udcff: "),
    (["label=" + "x" * 3000, "repeats=x"], "repeats: got 'x'"),
    (["size=1", "size=2"], "already set by 'size=1'"),
    (["benchmark=attention", "benchmark=fsdp"], "already set by 'benchmark=attention'"),
    (["other.yaml"], "expected key=value"),
]
_OPTIONS = [
    (["--cluster", "pbs"], "'pbs' is not one of"),
    (["--debug"], "only one of --local, --debug and --cluster"),
    (["--local=yes"], "does not take a value"),
    (["--filter", ""], "'' is not a comparison"),
    (["--filter", "size > 5"], "no runs (2 left out by the filter)"),
    (["--filter", "size > \udcff"], "is not a comparison"),
    (["--filter", "size == 1 or " * 200], "at most 2000 characters"),
    (["--out", ""], "must not be empty"),
    (["--out", "x" * 300], "at most 255 bytes"),
    (["--out", "sweep.yaml/out"], "--out must be a folder"),
    (["--out", "a\nb"], "without line breaks and other control characters, got 'a\\nb'"),
    (["--out", "~/x"], "must not begin with - or ~"),
    (["--out", "/tmp/.."], "such as logs/mine, got the root folder '/tmp/..'"),
    (["--out", os.path.expanduser("~")], "got your home folder"),
    (["--out", str(Path(__file__).parents[3])], "got the folder of this project"),
    (["--cluster-file", "no.yaml"], "no.yaml: cannot be read"),
]
_EXECUTORS = [
    (["--debug", "--snapshot"], "not allowed together with --debug"),
    (["--debug", "--parallel", "2"], "--parallel requires --local"),
    (["--sbatch"], "--sbatch requires --dry-run"),
]
_CLUSTER_FILES: list[tuple[Content, str]] = [
    ("- 1\n", "cluster.yaml:1:1: "),
    ("slrum: {}\n", "did you mean 'slurm'?"),
    ("slurm: {partitoin: b}\n", "cluster.yaml:1:9: unknown key 'partitoin'"),
    ("base: cluster.yaml\n", "must not inherit from itself"),
]
_VARIABLES = [
    ("", "JOBS_CLUSTER must name a cluster file"),
    ("no.yaml", "no.yaml: cannot be read"),
    ("x" * 256, "at most 255 bytes"),
]
SUBMIT = ("jobs.submit", "sweep.yaml")
CASES = [
    *(Case((*SUBMIT, *PLAN, *w), m, {"sweep.yaml": GRID}) for w, m in (*_OVERRIDES, *_OPTIONS)),
    *(Case((*SUBMIT, *words), message, {"sweep.yaml": GRID}) for words, message in _EXECUTORS),
    *(
        Case((*SUBMIT, *PLAN), message, {"sweep.yaml": GRID, "cluster.yaml": content})
        for content, message in _CLUSTER_FILES
    ),
    *(
        Case((*SUBMIT, *PLAN), message, {"sweep.yaml": GRID}, {"JOBS_CLUSTER": value})
        for value, message in _VARIABLES
    ),
    *(
        Case((*SUBMIT, *PLAN, "--filter", text), message, {"sweep.yaml": MIXED})
        for text, message in (
            ("scale > 1 and depth > 1", "no runs (2 left out by the filter)"),
            ("benchmark == 'tests.benchmarks.countr'", "did you mean 'tests.benchmarks.counter'?"),
        )
    ),
    Case(("jobs.submit",), "Missing argument"),
]
