"""Bad command lines of `jobs.submit`: overrides, options and cluster files."""

from __future__ import annotations

import os
from pathlib import Path

from tests.jobs.bad_input.case import HEAD, ONE, PLAN, Case, Content

GRID = HEAD + "grid: {size: [1, 2]}\ncases: [{fixed: {mode: fast}}]\n"
COUNTER = "tests.benchmarks.counter"
MIXED = HEAD + f"{ONE}cases: [{{}}, {{benchmark: {COUNTER}, grid: {{depth: [1, 3]}}}}]\n"
BLOCKS = (
    HEAD + "grid: {size: [1, 2], mode: [fast, exact]}\n"
    "blocks: {interleave: [mode], baseline: {mode: exact}}\n"
)
_OVERRIDES = [
    (["size"], "command line: size: expected key=value"),
    (["sise=5"], "did you mean 'size'?"),
    (["partition=a"], "a key of a sweep; it is a key of slurm"),
    (["slrum.partition=a"], "'slrum' is neither a parameter nor a key of a sweep"),
    (["size=[1,large]"], "command line: size=[1,large]: size: got 'large', expected a valid"),
    (["size=[1"], "not valid YAML"),
    (["size="], "got None"),
    (["size=[]"], "at least 1 item"),
    (["cases.0.fixed.size=1"], "cases is not a mapping"),
    (["filter=size == 1"], "'filter' is neither"),
    (["window=4"], "the window is larger than the size"),
    (["size=\udcff"], "size=\\udcff: "),
    (["label=" + "x" * 3000, "repeats=x"], "repeats: got 'x'"),
    (["size=1", "size=2"], "already set by 'size=1'"),
]
_OPTIONS = [
    (["--cluster", "pbs"], "'pbs' is not one of"),
    (["--debug"], "only one of --local, --debug and --cluster"),
    (["--filter", ""], "'' is not a comparison"),
    (["--filter", "size > 5"], "no runs (2 left out by the filter)"),
    (["--filter", "size == 1 or " * 200], "at most 2000 characters"),
    (["--out", ""], "must not be empty"),
    (["--out", "sweep.yaml/out"], "--out must be a folder"),
    (["--out", "a\nb"], "without line breaks and other control characters, got 'a\\nb'"),
    (["--out", "~/x"], "must not begin with - or ~"),
    (["--out", "/tmp/.."], "such as logs/mine, got the root folder '/tmp/..'"),
    (["--out", os.path.expanduser("~")], "got your home folder"),
    (["--out", str(Path(__file__).parents[3])], "got the folder of this project"),
    (["--cluster-file", "no.yaml"], "no.yaml: cannot be read"),
]
_EXECUTORS = [
    (["--debug", "--snapshot"], "--snapshot is not allowed together with --debug"),
    (["--debug", "--against", "HEAD"], "--against is not allowed together with --debug"),
    (["--debug", "--parallel", "2"], "--parallel requires --local"),
    (["--sbatch"], "--sbatch requires --dry-run"),
    (["--local", "--out", "/proc/new"], "/proc/new: No such file"),
]
_CLUSTER_FILES: list[tuple[Content, str]] = [
    ("- 1\n", "cluster.yaml:1:1: "),
    ("slrum: {}\n", "did you mean 'slurm'?"),
    ("slurm: {partitoin: b}\n", "cluster.yaml:1:9: unknown key 'partitoin'"),
    ("base: cluster.yaml\n", "must not inherit from itself"),
]
_VARIABLES = [
    ("x" * 300, "(env var: 'JOBS_CLUSTER'): a file name must have at most"),
    ("no.yaml", "no.yaml: cannot be read"),
]
_FILTERS = [
    (MIXED, "dept == 1", "did you mean 'depth'?"),
    (MIXED, "mode == exakt or depth == 1", "mode: got 'exakt'"),
    (MIXED, "scale > 1 and depth > 1", "no runs (3 left out by the filter)"),
    (MIXED, "benchmark == 'tests.benchmarks.countr'", "did you mean 'tests.benchmarks.counter'?"),
    (MIXED, f"benchmark == '{COUNTER}' and depth == 2", "depth has the values [1, 3]"),
    (BLOCKS, "mode == fast", "(valid: fast); the filter must keep the baseline"),
    (BLOCKS, "size == 1 or mode == fast", "in the block tests.benchmarks.toy size=2"),
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
        Case((*SUBMIT, *PLAN, "--filter", text), message, {"sweep.yaml": sweep})
        for sweep, text, message in _FILTERS
    ),
    Case((*SUBMIT, *PLAN, "size=1"), "sweep.yaml:3:7: ", {"sweep.yaml": HEAD + "grid: [1]\n"}),
    Case(SUBMIT, "(no sbatch on PATH); use --local", {"sweep.yaml": GRID}, {"PATH": ""}),
    Case(("jobs.submit",), "Missing argument"),
]
