"""Bad results folders, templates and references, and options of the commands that take them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.jobs.bad_input.case import HEAD, ONE, PLAN, Case, Content
from tests.jobs.results_folder import ResultsFolder, load, ok


def results(path: Path) -> None:
    """Create a results folder with a record of two runs, which have the ids of GRID below."""
    text = HEAD + "grid: {size: [1, 2]}\ntables: [{name: t, rows: [size]}]\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    ResultsFolder(path).submit(load(path.parent, text), lambda params, repeat: ok(1.0))


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return a function that creates a results folder and changes the data of its manifest."""

    def create(path: Path) -> None:
        results(path)
        (manifest,) = path.glob("submissions/*/manifest.json")
        data = json.loads(manifest.read_text())
        change(data)
        manifest.write_text(json.dumps(data))

    return create


def with_file(pattern: str, content: bytes | None) -> Callable[[Path], None]:
    """Return a function that creates a results folder and replaces a file of its submission.

    Args:
        content: the content. None: a folder takes the place of the file.
    """

    def create(path: Path) -> None:
        results(path)
        (submission,) = path.glob("submissions/*")
        if content is None:
            (submission / pattern).unlink(missing_ok=True)
            (submission / pattern).mkdir()
        else:
            (submission / pattern).write_bytes(content)

    return create


def other(path: Path) -> None:
    """Create a results folder whose runs differ from those of `results`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = HEAD + "grid: {size: [7, 8]}\n"
    ResultsFolder(path).submit(load(path.parent, text), lambda params, repeat: ok(1.0))


def without_submissions(path: Path) -> None:
    results(path)
    shutil.rmtree(path / "submissions")


MISSING = "holds no submission (expected "
NO_FOLDER = "/no; give a results folder"  # after the path of the working folder
_FOLDERS: list[tuple[str, dict[str, Content], str]] = [
    ("no", {}, NO_FOLDER),
    ("file", {"file": ""}, "file is a file; give a results folder"),
    ("all", {"all/out": results}, "manifest.json); results folders in it: "),
    ("out", {"out": os.mkdir}, MISSING),
    ("out", {"out": without_submissions}, MISSING),
    ("out", {"out/submissions": "a file"}, "out/submissions cannot be read: Not a directory"),
    ("out/submissions", {"out": results}, MISSING),
    ("/dev/zero", {}, "/dev/zero/submissions cannot be read: Not a directory"),
    ("", {}, "a path must not be empty, got ''"),
    ("a\0b", {}, "a path must not contain a NUL character"),
    ("x" * 256, {}, "a file name must have at most 255 bytes, got 256 bytes"),
    ("a\udce9", {}, "a path must be valid UTF-8, got 'a\\udce9'"),
    ("out", {"out": with_file("manifest.json", b"")}, "can read: Invalid JSON: EOF while"),
    ("out", {"out": with_file("manifest.json", b"{")}, "Invalid JSON: EOF while parsing an object"),
    ("out", {"out": with_file("manifest.json", b"\xff")}, "Invalid JSON: expected value at line 1"),
    ("out", {"out": with_file("manifest.json", None)}, "this version can read: Is a directory"),
    ("out", {"out": with_file("manifest.json", b"[]")}, "is not a manifest that this version"),
    ("out", {"out": with_file("manifest.json", b"5")}, "is not a manifest that this version"),
    ("out", {"out": with_file("manifest.json", b"{}")}, "the key 'id' is missing"),
    ("out", {"out": changed(lambda data: data.pop("runs"))}, "the key 'runs' is missing"),
    ("out", {"out": changed(lambda data: data.update(executor="pbs"))}, "executor: Input"),
    ("out", {"out": changed(lambda data: data.update(runs=5))}, "is not a manifest that this"),
    ("out", {"out": changed(lambda data: data["sweep"].pop("name"))}, "key 'sweep.name' is m"),
    ("out", {"out": changed(lambda data: data["jobs"][0].update(tasks=[1]))}, "not a manifest"),
]  # fmt: skip
_COMMANDS: list[tuple[tuple[str, ...], str]] = [
    (("jobs",), "Usage: "),
    (("jobs", "stauts"), "No such command 'stauts'"),
    (("jobs", "compare", "logs/x"), "compare belongs to aggregate.py: "),
    (("jobs", "report"), "report belongs to aggregate.py: "),
    (("jobs", "submit", "sweep.yaml"), "submit belongs to jobs.submit: "),
    (("aggregate", "status", "logs/x"), "status belongs to jobs: "),
    (("aggregate", "submit"), "submit belongs to jobs.submit: "),
    (("jobs", "--json"), "No such option: --json"),
    (("jobs", "status"), "no results folder given, and none in ./logs has an accepted submission"),
    (("jobs", "cancel"), "no results folder given, and none in ./logs has an accepted submission"),
    (("jobs", "retry"), "no results folder given, and none in ./logs has an accepted submission"),
    (("jobs", "status", "out", "--jsn"), "No such option: --jsn"),
    (("jobs", "status", "out", "out"), "Got unexpected extra argument"),
    (("jobs", "status", "--in", "out"), "No such option: --in"),
    (("jobs", "status", "out", "--watch", "0"), "greater than or equal to 0.5"),
    (("jobs", "status", "out", "--watch", "inf"), "less than or equal to 86400"),
    (("jobs", "status", "out", "--watch=nan"), "Invalid value for '--watch'"),
    (("jobs", "cancel", "no"), NO_FOLDER),
    (("jobs", "retry", "no"), NO_FOLDER),
    (("jobs", "cancel", "--all", "out"), "No such option: --all"),
    (("jobs", "retry", "out", "size=1"), "Got unexpected extra argument"),
    (("jobs", "logs"), "Missing argument 'RUN'"),
    (("jobs", "logs", ""), "RUN must be the first characters of a run id, got ''"),
    (("jobs", "logs", "zzz", "--in", "out"), "no run whose id begins with 'zzz' in out"),
    (("jobs", "logs", "zzz"), "no run whose id begins with 'zzz' in ./logs"),
    (("jobs", "logs", "a\udcff", "--in", "out"), "no run whose id begins with 'a\\udcff'"),
    (("jobs", "logs", "a\0"), "no run whose id begins with 'a\\x00'"),
    (("jobs", "logs", "a", "--in"), "requires an argument"),
    (("jobs", "logs", "a", "--in", "no"), NO_FOLDER),
    (("jobs", "logs", "a", "--in", ""), "Invalid value for '--in': a path must not be empty"),
    (("jobs", "replay"), "Missing argument 'RUN'"),
    (("jobs", "replay", "0", "--in", "sweep.yaml"), "sweep.yaml is a file; give a results folder"),
    (("jobs", "replay", "zzz", "--in", "out"), "no run whose id begins with 'zzz' in out"),
    (("jobs", "carry"), "the current folder must be in a git repository, got "),
    (("jobs", "carry", "out"), "Got unexpected extra argument"),
    # ---- tables and comparisons
    (("aggregate",), "Missing argument"),
    (("aggregate", "no"), NO_FOLDER),
    (("aggregate", "out", "out"), "Got unexpected extra argument"),
    (("aggregate", "out", "--format", "xml"), "'xml' is not one of 'md', 'csv', 'latex', 'html'"),
    (("aggregate", "out", "--table", "tt"), "--table: sweep toy has no table 'tt'"),
    (("aggregate", "out", "--table", ""), "--table: sweep toy has no table ''"),
    (("aggregate", "out", "--plot", ""), "Invalid value for '--plot': a path must not be empty"),
    (("aggregate", "out", "--plot", "sweep.yaml"), "--plot must be a folder, got the file"),
    (("aggregate", "out", "--plot", "sweep.yaml/x"), "--plot must be a folder, got the file"),
    (("aggregate", "out", "--views", "no.yaml"), "no.yaml: cannot be read: No such file"),
    (("aggregate", "out", "--views", "out"), "it must be a regular file, got a folder"),
    (("aggregate", "out", "--views", "/dev/zero"), "it must be a regular file, got a device"),
    (("aggregate", "out", "--views", ""), "Invalid value for '--views': a path must not be empty"),
    (("aggregate", "out", "--text", "no.j2"), "--text: no.j2 cannot be read: No such file"),
    (("aggregate", "out", "--text", "out"), "--text: out cannot be read: it must be a regular"),
    (("aggregate", "out", "--text", "/dev/zero"), "it must be a regular file, got a device"),
    (("aggregate", "out", "--text", ""), "Invalid value for '--text': a path must not be empty"),
    (("aggregate", "attempts"), "Missing argument"),
    (("aggregate", "attempts", "no"), NO_FOLDER),
    (("aggregate", "attempts", "out", "out"), "Got unexpected extra argument"),
    (("aggregate", "attempts", "out", "--format", "html"), "'html' is not one of 'md', 'csv'"),
    (("aggregate", "attempts", "out", "--where", "sise > 1"), "--where: 'sise > 1': 'sise' is not"),
    (("aggregate", "attempts", "out", "--where", "status == fine"), "--where: 'status == fine': "),
    (("aggregate", "export"), "Missing argument"),
    (("aggregate", "export", "no"), NO_FOLDER),
    (("aggregate", "export", "out", "no", "--out", "a.csv"), NO_FOLDER),
    (("aggregate", "export", "out", "--out", ""), "'--out': a path must not be empty"),
    (("aggregate", "export", "out", "--out", "out"), "--out: must be a file, got the folder 'out'"),
    (("aggregate", "export", "out", "--out", "a"), "name must end in .csv or .parquet, got 'a'"),
    (("aggregate", "export", "out", "--out", "a.xls"), "must end in .csv or .parquet, got 'a.xls'"),
    (("aggregate", "export", "out", "--out", "no/a.csv"), "--out: the folder 'no' does not exist"),
    (("aggregate", "export", "out", "--out", "sweep.yaml/a.csv"), "the folder 'sweep.yaml' does "),
    (("aggregate", "compare"), "Missing argument"),
    (("aggregate", "compare", "out"), "it has no paired rounds. To measure runs in turn, add"),
    (("aggregate", "compare", "out", "out"), "must be different folders, got"),
    (("aggregate", "compare", "no"), NO_FOLDER),
    (("aggregate", "compare", "no", "out"), NO_FOLDER),
    (("aggregate", "compare", "out", "out", "out"), "Got unexpected extra argument"),
    (("aggregate", "compare", "out", "no"), NO_FOLDER),
    (("aggregate", "compare", "sweep.yaml", "out"), "sweep.yaml is a file; give a results folder"),
    (("aggregate", "compare", "out", ""), "a path must not be empty, got ''"),
    (("aggregate", "compare", "out", "--tolerance", "-1"), "--margin must be greater than 0 and"),
    (("aggregate", "compare", "out", "--margin", "0"), "--margin must be greater than 0 and less"),
    (("aggregate", "compare", "out", "--margin", "nan"), "--margin must be greater than 0 and"),
    (("aggregate", "compare", "out", "--margin", "2%"), "a number such as 0.01 for 1%, got '2%'"),
    (("aggregate", "compare", "out", "--format", "html"), "Invalid value for"),
    (("aggregate", "compare", "out", "--where", "sise > 1"), "--where: 'sise > 1': 'sise' is"),
    (("aggregate", "compare", "out", "--where", ""), "--where: "),
    (("aggregate", "compare", "out", "other"), "have no run in common: their benchmarks, versions"),
]  # fmt: skip
_TEMPLATES: list[tuple[Content, str]] = [
    ("{% block tt %}a{% endblock %}", "block 'tt': the sweep has no such table"),
    ("text", "text must be in a block that names its table"),
    ("{% block t %}", "text.j2:1: "),
    ("{% block t %}{{ value( }}{% endblock %}", "text.j2:1: "),
    ("{% block t %}{{ nothing }}{% endblock %}", "'nothing' is undefined"),
    ("{% block t %}{{ value('tme', 'forward', size=1) }}{% endblock %}", "'tme'"),
    ("{% block t %}{{ value('time', 'forward', sise=1) }}{% endblock %}", "sise"),
    ("{% block t %}{{ value('time', 'forward') }}{% endblock %}", "text.j2:1: "),
    ("{% block t %}{{ 1 / 0 }}{% endblock %}", "text.j2:1: division by zero"),
    ("{% block t %}{{ 1 | nothing }}{% endblock %}", "No filter named 'nothing'"),
    ("{% block t %}{% endblock %}{% block t %}{% endblock %}", "block 't' defined twice"),
    ("{% block t %}{% include 'sweep.yaml' %}{% endblock %}", "text.j2"),
    (b"\xff", "text.j2 cannot be read: 'utf-8' codec"),
    (os.mkfifo, "text.j2 cannot be read: it must be a regular file, got a pipe"),
    (b" " * 3_000_000, "text.j2 cannot be read: it must have at most 2000000 bytes"),
]
_CHECKS: list[tuple[list[str], str]] = [
    ([], "Missing argument"),
    (["a"], "a reference must be FILE.py:NAME or PACKAGE.MODULE:NAME, got 'a'"),
    (["a.py"], "a reference must be FILE.py:NAME or PACKAGE.MODULE:NAME, got 'a.py'"),
    (["a.py:"], "a reference must be FILE.py:NAME"),
    ([":a"], "a reference must be FILE.py:NAME"),
    (["a.py:1x"], "a reference must be FILE.py:NAME"),
    (["a.txt:f"], "there is no module 'a.txt', neither in "),
    ([""], "a reference must be FILE.py:NAME or PACKAGE.MODULE:NAME, got ''"),
    (["no.py:f"], "there is no file 'no.py' in "),
    (["no_such_package.x:f"], "there is no module 'no_such_package.x'"),
    (["folder.py:f"], "there is no file 'folder.py' in "),
    (["pipe.py:f"], "there is no file 'pipe.py' in "),
    ([f"{'x' * 300}.py:f"], "there is no file 'xxxx"),
    ([f"{'x' * 300}:f"], "there is no module 'xxxx"),
    (["a\0.py:f"], "there is no file 'a\\x00.py' in "),
    (["a\udcff.py:f"], "there is no file 'a\\udcff.py' in "),
    (["code.py:forwrad"], "code.py has no 'forwrad'; did you mean 'forward'?"),
    (["syntax.py:f"], "syntax.py:1: "),
    (["nul.py:f"], "nul.py: source code string cannot contain null bytes"),
    (["latin.py:f"], "latin.py:1: (unicode error)"),
    (["imports.py:f"], "imports.py:1: there is no module 'no_such_module'"),
    (["code.py:forward", "--as", "kernel"], "'kernel' is not one of 'attention', 'ddp', 'fsdp'"),
    (["code.py:two"], "what it implements is unknown; use --as with one of"),
    (["code.py:two", "--as", "attention"], "attention must take (q, k, v, is_causal), got (a, b)"),
    (["code.py:two", "--as", "optimizer"], "must take (params, optimizer_cls, **options), got"),
    (["code.py:Plain", "--as", "attention"], "must be a function that takes"),
    (["code.py:kernel", "--as", "attention"], "is a Triton kernel; name the function that launch"),
    (["code.py:Flash", "--as", "ddp"], "is a torch.autograd.Function; a DDP wrapper must be"),
    (["code.py:forward", "--dtype", "int8"], "--dtype must be one of bf16, fp16, fp32, got 'int8'"),
    (["code.py:forward", "--seq-len", "0"], "Invalid value for '--seq-len'"),
    (["code.py:forward", "--seq-len", "1,2"], "Invalid value for '--seq-len'"),
    (["code.py:forward", "--head-dim", "-8"], "Invalid value for '--head-dim'"),
    (["code.py:forward", "--seconds", "-1"], "Invalid value for '--seconds'"),
    (["code.py:forward", "--gpu"], "No such option: --gpu"),
    (["code.py:forward", "code.py:two"], "Got unexpected extra argument"),
]
_SOURCES: dict[str, Content] = {
    "code.py": """\
import torch, triton
def forward(q, k, v, is_causal): ...
def two(a, b): ...
class Plain: ...
class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal): ...
@triton.jit
def kernel(q, k, v, is_causal): ...
""",
    "syntax.py": "def f(",
    "nul.py": b"def f(): ...\0",
    "latin.py": b"x = 'caf\xe9'",
    "imports.py": "import no_such_module\ndef f(q, k, v): ...",
    "folder.py": os.mkdir,
    "pipe.py": os.mkfifo,
}
# A sweep with a reference, and the error. The benchmark attention checks it.
_ATTENTION = (
    "name: a\nbenchmark: attention\nfixed: {seq_len: 128, head_dim: 64, implementation: %s}\n"
)
_REFERENCES = [
    ("fsdp", "implementation: got 'fsdp', expected 'naive'"),
    ("flash_tritn", "did you mean 'flash_triton'?"),
    ("no.py:f", "implementation: there is no file 'no.py' in "),
    ("'code.py:'", "implementation: a reference must be FILE.py:NAME"),
    ("code.py:forwrad", "code.py has no 'forwrad'; did you mean 'forward'?"),
    ("code.py:two", "attention must take (q, k, v, is_causal), got (a, b)"),
    ("syntax.py:f", "syntax.py:1: '(' was never closed"),
    ("imports.py:f", "imports.py:1: there is no module 'no_such_module'"),
    (f"{'x' * 300}.py:f", "there is no file 'xxxx"),
    ('"a\\0.py:f"', "there is no file 'a\\x00.py'"),
    ("pipe.py:f", "there is no file 'pipe.py'"),
    ("no.such.module:f", "there is no module 'no.such.module'"),
]
_LOGS = "logs cannot be read: Not a directory"
_HERE: dict[str, Content] = {"sweep.yaml": HEAD + ONE, "out": results}
CASES = [
    *(Case(("jobs", "status", name), message, files) for name, files, message in _FOLDERS),
    *(Case(words, message, {**_HERE, "other": other}) for words, message in _COMMANDS),
    *(
        Case(("aggregate", "out", "--text", "text.j2"), message, {**_HERE, "text.j2": content})
        for content, message in _TEMPLATES
    ),
    *(Case(("jobs", "check", *words), message, _SOURCES) for words, message in _CHECKS),
    *(
        Case(
            ("jobs.submit", "sweep.yaml", *PLAN),
            message,
            {**_SOURCES, "sweep.yaml": _ATTENTION % value},
        )
        for value, message in _REFERENCES
    ),
    *(Case(("jobs", *words), _LOGS, {"logs": ""}) for words in (["status"], ["logs", "a"])),
    Case(
        ("jobs.submit", "sweep.yaml", *PLAN, "--out", "out"),
        "manifest.json is not a manifest that this version can read: Invalid JSON",
        {"sweep.yaml": HEAD + ONE, "out": with_file("manifest.json", b"")},
    ),
    Case(
        ("aggregate", "compare", "broken", "out"),
        "manifest.json is not a manifest that this version can read: Invalid JSON",
        {**_HERE, "broken": with_file("manifest.json", b"{]")},
    ),
    Case(
        ("aggregate", "out", "--views", "bad.yaml"),
        "bad.yaml:4:1: unknown key 'tabels'",
        {**_HERE, "bad.yaml": HEAD + ONE + "tabels: []\n"},
    ),
]
