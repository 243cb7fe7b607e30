"""Bad command lines of `jobs.submit`: overrides, options and cluster files."""

from __future__ import annotations

import os

from tests.jobs.bad_input.case import HEAD, ONE, PLAN, Case, Content

GRID = HEAD + "grid: {size: [1, 2]}\ncases: [{fixed: {mode: fast}}]\n"
MIXED = HEAD + ONE + "cases: [{}, {benchmark: tests.benchmarks.counter}]\n"
_OVERRIDES = [
    (["size"], "command line: size: expected key=value, for example seq_len=[128,256]"),
    (["=5"], "command line: =5: expected key=value"),
    ([""], "expected key=value"),
    (["sise=5"], "'sise' is neither a parameter nor a key of a sweep; did you mean 'size'?"),
    (["size =5"], "'size ' is neither a parameter nor a key of a sweep; did you mean 'size'?"),
    (["size==5"], "size: got '=5', expected a valid integer"),
    (["--sise=5"], "No such option: --sise"),
    (["slrum.partition=a"], "'slrum' is neither a parameter nor a key of a sweep"),
    (["slurm.partitoin=a"], "unknown key 'partitoin'; did you mean 'partition'?"),
    (["slurm..partition=a"], "command line: slurm..partition=a: unknown key ''"),
    (["slurm.=a"], "unknown key ''"),
    ([".=a"], "'' is neither a parameter nor a key of a sweep"),
    (["slurm=5"], "slurm: got 5, expected a mapping"),
    (["slurm.partition=[a]"], "slurm.partition: got ['a'], expected a valid string"),
    (['slurm.partition="a\\nb"'], "slurm.partition must be one line without control characters"),
    (["name.first=a"], "name is not a mapping, so name.first cannot be set"),
    (["cases.0.fixed.size=1"], "cases is not a mapping, so cases.0.fixed.size cannot be set"),
    (["tables.0.name=t"], "command line: tables.0.name=t: tables: got {'0': {'name': 't'}}, "),
    (["name=a/b"], "name: got 'a/b', expected text that matches the pattern"),
    (["name="], "name: got None, expected a valid string"),
    (["size=large"], "size: got 'large', expected a valid integer"),
    (["size=[1,large]"], "size: got 'large', expected a valid integer"),
    (["size="], "size: got None, expected a valid integer"),
    (["size=[]"], "grid.size: got []"),
    (["size=[1"], "not valid YAML"),
    (["size={a: 1}"], "got {'a': 1}"),
    (["size=1,2"], "size: got '1,2', expected a valid integer"),
    (["size=1e4"], "such as 1.0e-4"),
    (["size=!!int 1"], "tag '!!int' is not allowed"),
    (["size=1\0"], "character U+0000 is not allowed in YAML"),
    (["size=\udcff"], "command line: size=\\udcff: "),
    (["label=" + "x" * 3000, "repeats=x"], "repeats: got 'x', expected a valid integer"),
    (["window=4"], "the window is larger than the size"),
    (["size=1", "size=2"], "'size' must be given once, but is already set by 'size=1'"),
    (["size=1", "size=1"], "'size' must be given once, but is already set by 'size=1'"),
    (["size=1", "grid.size=[2]"], "'grid.size' must be given once, but is already set by 'size=1'"),
    (["slurm={}", "slurm.qos=a"], "'slurm.qos' must be given once, but is already set by 'slurm={"),
    (["slurm.qos=a", "slurm={}"], "'slurm' must be given once, but is already set by 'slurm.qos=a"),
    (["fixed.sise=1"], "has no parameter 'sise'; did you mean 'size'?"),
    (["fixed=5"], "fixed: got 5, expected a mapping"),
    (["filter=size == 1"], "'filter' is neither a parameter nor a key of a sweep"),
    (["base=other.yaml"], "'base' is neither a parameter nor a key of a sweep"),
    (["benchmark=tyo"], "there is no benchmark 'tyo'"),
    (["benchmark="], "benchmark: got None, expected a valid string"),
    (["benchmark=attention", "benchmark=fsdp"], "already set by 'benchmark=attention'"),
    (["repeats=0"], "repeats: got 0, expected greater than or equal to 1"),
    (["order=shuffle"], "order: got 'shuffle', expected 'as_written' or a mapping"),
    (["resources.nodes=$rank"], "'$rank' does not name a parameter; did you mean 'ranks'?"),
    (["resources.mem_gb=0.0001"], "resources.mem_gb must be at least 0.001, got 0.0001"),
    (["exclude=size == 1"], "exclude: got 'size == 1', expected a valid list"),
    (["other.yaml"], "command line: other.yaml: expected key=value"),
]  # fmt: skip
_OPTIONS = [
    (["--dry-rnu"], "No such option: --dry-rnu"),
    (["--cluster", "pbs"], "'pbs' is not one of 'slurm', 'local', 'debug'"),
    (["--cluster"], "requires an argument"),
    (["--debug"], "only one of --local, --debug and --cluster is allowed"),
    (["--cluster", "slurm"], "only one of --local, --debug and --cluster is allowed"),
    (["--parallel", "0"], "Invalid value for '--parallel'"),
    (["--parallel", "two"], "Invalid value for '--parallel'"),
    (["--parallel", "1.5"], "Invalid value for '--parallel'"),
    (["--local=yes"], "does not take a value"),
    (["--filter", ""], "--where: '' is not a comparison"),
    (["--filter", "   "], "--where: '   ' is not a comparison"),
    (["--filter", "sise > 1"], "--where: 'sise > 1': 'sise' is not a parameter; did you mean"),
    (["--filter", "size = 1"], "--where: 'size = 1' is not a comparison"),
    (["--filter", "size > 5"], "--where: the sweep has no runs (2 left out by the filter)"),
    (["--filter", "mode == fsat"], "--where: 'mode == fsat': mode: got 'fsat', expected 'fast'"),
    (["--filter", "window > 1"], "compares null with 1, which have no order"),
    (["--filter", "size > 1\0"], "is not a comparison"),
    (["--filter", "size > \udcff"], "is not a comparison"),
    (["--filter", "size == 1\nsize"], "'size == 1\\nsize' is not a comparison"),
    (["--filter", "size == 1 or " * 200], "must have at most 2000 characters, got 2600"),
    (["--filter", "benchmark == toy"], "no run of this sweep has benchmark 'toy' (valid: tests"),
    (["--filter", "benchmrk == toy"], "'benchmrk' is not a parameter; did you mean 'benchmark'?"),
    (["--filter", "benchmark == tests.benchmarks.toy"], "write text with other characters than"),
    (["--filter", "benchmark"], "is not a comparison of a parameter"),
    (["--out", ""], "Invalid value for '--out': a path must not be empty, got ''"),
    (["--out", "a\0"], "Invalid value for '--out': a path must not contain a NUL character"),
    (["--out", "x" * 300], "a file name must have at most 255 bytes, got 300 bytes"),
    (["--out", "a\udc80"], "a path must be valid UTF-8, got 'a\\udc80'"),
    (["--out", "d/" * 3000], "a path must have at most 4095 bytes, got 6000 bytes"),
    (["--out", "sweep.yaml"], "--out must be a folder, got the file 'sweep.yaml'"),
    (["--out", "sweep.yaml/out"], "--out must be a folder, got the file 'sweep.yaml'"),
    (["--out", "/dev/null"], "--out must be a folder, got the file '/dev/null'"),
    (["--cluster-file", ""], "Invalid value for '--cluster-file': a path must not be empty"),
    (["--cluster-file", "no.yaml"], "no.yaml: cannot be read: No such file or directory"),
    (["--cluster-file", "."], "it must be a regular file, got a folder"),
    (["--cluster-file", "/dev/zero"], "it must be a regular file, got a device"),
]
_EXECUTORS = [
    (["--debug", "--cluster", "debug"], "only one of --local, --debug and --cluster is allowed"),
    (["--debug", "--local"], "only one of --local, --debug and --cluster is allowed"),
    (["--debug", "--snapshot"], "--snapshot is not allowed together with --debug"),
    (["--debug", "--parallel", "2"], "--parallel requires --local, got --parallel 2"),
    (["--parallel", "2"], "--parallel requires --local, got --parallel 2 with executor slurm"),
    (["--cluster", "slurm", "--parallel", "1", "--dry-run"], "--parallel requires --local"),
    (["--sbatch"], "--sbatch requires --dry-run"),
    (["--local", "--sbatch"], "--sbatch requires --dry-run"),
]
_CLUSTER_FILES: list[tuple[Content, str]] = [
    ("- 1\n", "cluster.yaml:1:1: the file must be a mapping of keys to values, got a list"),
    ("hunter2", "cluster.yaml:1:1: the file must be a mapping of keys to values, got a string"),
    ("slrum: {}\n", "'slrum' is not a key of a cluster file; did you mean 'slurm'?"),
    ("repeats: 2\n", "'repeats' is not a key of a cluster file"),
    ("name: a\n", "'name' is not a key of a cluster file"),
    ("partition: gpu\n", "'partition' is not a key of a cluster file"),
    ("slurm: gpu\n", "cluster.yaml:1:8: slurm: got 'gpu', expected a mapping"),
    ("slurm: {partitoin: b}\n", "cluster.yaml:1:9: unknown key 'partitoin'; did you mean"),
    ("slurm: {partition: on}\n", "'on': YAML 1.1 reads this as a boolean"),
    ("slurm: {array_parallelism: many}\n", "slurm.array_parallelism: got 'many'"),
    ('slurm: {account: "a\\nb"}\n', "cluster.yaml:1:18: slurm.account must be one line"),
    ("slurm: {setup: [null]}\n", "slurm.setup.0: got None, expected a valid string"),
    ("resources: {gpus: 8}\n", "cluster.yaml:1:13: unknown key 'gpus'"),
    ("resources: {mem_gb: -1}\n", "resources.mem_gb: got -1"),
    ("resources: {nodes: $nodes}\n", "'$nodes' does not name a parameter"),
    ("slurm: {\n", "cluster.yaml:2:1: not valid YAML"),
    (b"slurm: {partition: \xe9}\n", "cluster.yaml:1:20: byte 0xe9 is not valid UTF-8"),
    (os.mkfifo, "cluster.yaml: cannot be read: it must be a regular file, got a pipe"),
    (b"#" * 3_000_000, "cluster.yaml: cannot be read: it must have at most 2000000 bytes"),
    ("base: cluster.yaml\n", "a file must not inherit from itself"),
]
_VARIABLES = [
    (
        "",
        "the environment variable JOBS_CLUSTER must name a cluster file: a path must not be empty",
    ),
    ("no.yaml", "no.yaml: cannot be read: No such file or directory"),
    (".", "it must be a regular file, got a folder"),
    ("x" * 256, "JOBS_CLUSTER must name a cluster file: a file name must have at most 255 bytes"),
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
            ("scale > 1 and depth > 1", "no benchmark of this sweep has all these parameters"),
            ("benchmark == 'tests.benchmarks.countr'", "did you mean 'tests.benchmarks.counter'?"),
            ("mode == slwo", "got 'slwo'"),
        )
    ),
    Case(("jobs.submit",), "Missing argument"),
    Case(("jobs.submit", "--local"), "Missing argument"),
]
