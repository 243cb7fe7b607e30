"""Bad results folders, templates and references, and options of the commands that take them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.jobs.bad_input.case import HEAD, ONE, PLAN, Case, Content
from tests.jobs.results_folder import ResultsFolder, ok


def results(path: Path, sizes: str = "[1, 2]") -> None:
    """Create a results folder with the records of runs of some sizes."""
    text = HEAD + f"grid: {{size: {sizes}}}\ntables: [{{name: t, rows: [size]}}]\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    ResultsFolder(path).submit(text, ok(1.0))


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return a function that creates a results folder and changes the data of its manifest."""

    def create(path: Path) -> None:
        results(path)
        (manifest,) = path.glob("submissions/*/manifest.json")
        data = json.loads(manifest.read_text())
        change(data)
        manifest.write_text(json.dumps(data))

    return create


def with_manifest(content: bytes | None) -> Callable[[Path], None]:
    """Return a function that creates a results folder with another manifest. None: a folder."""

    def create(path: Path) -> None:
        results(path)
        (manifest,) = path.glob("submissions/*/manifest.json")
        if content is None:
            manifest.unlink()
            manifest.mkdir()
        else:
            manifest.write_bytes(content)

    return create


def other(path: Path) -> None:
    """Create a results folder whose runs differ from those of `results`."""
    results(path, "[7, 8]")


def without_submissions(path: Path) -> None:
    results(path)
    shutil.rmtree(path / "submissions")


NO_FOLDER = "there is no folder"  # after the path of the working folder
BAD_MANIFEST = "is not a manifest that this version"
_FOLDERS: list[tuple[str, dict[str, Content], str]] = [
    ("no", {}, NO_FOLDER),
    ("file", {"file": ""}, "file is a file"),
    ("a\udce9", {}, r"a path must be valid UTF-8, got 'a\udce9'"),
    ("all", {"all/out": results}, "results folders in it: "),
    ("out", {"out": without_submissions}, "holds no submission"),
    ("out", {"out": with_manifest(b"{")}, "Invalid JSON"),
    ("out", {"out": with_manifest(None)}, "Is a directory"),
    ("out", {"out": changed(lambda data: data.pop("runs"))}, "the key 'runs' is missing"),
    ("out", {"out": changed(lambda data: data["sweep"].pop("name"))}, "key 'sweep.name' is m"),
    ("out", {"out": changed(lambda data: data["runs"][0].update(shape=99))}, BAD_MANIFEST),
]
_COMMANDS: list[tuple[tuple[str, ...], str]] = [
    (("jobs",), "Usage: "),
    (("jobs", "stauts"), "No such command 'stauts'"),
    (("jobs", "status"), "no submission was made here"),
    (("jobs", "status", "out", "--watch", "0"), "greater than or equal to 0.5"),
    (("jobs", "status", "out", "--where", "status == oks"), "got 'oks'; did you mean 'ok'?"),
    (("jobs", "status", "out", "--where", "repeat == zero"), "got 'zero', expected an integer"),
    (("jobs", "status", "out", "--where", "status < 3"), "which have no order"),
    (("jobs", "status", "--where", "size > 1", "--where", "size > 2"), "join the conditions with"),
    (("jobs", "export", "out", "--out=a.csv", "--out=b.csv"), "--out is given 2 times"),
    (("jobs", "logs"), "Missing argument 'RUN'"),
    (("jobs", "logs", ""), "RUN must be the first characters of a run id"),
    (("jobs", "logs", "zzz", "--in", "out"), "no run whose id begins with 'zzz' in out"),
    (("jobs", "replay", "0", "--in", "sweep.yaml"), "sweep.yaml is a file"),
    (("jobs", "carry"), "must be in a git repository"),
    # ---- tables and comparisons
    (("aggregate", "no"), NO_FOLDER),
    (("aggregate", "out", "--format", "xml"), "'xml' is not one of"),
    (("aggregate", "out", "--table", "tt"), "sweep toy has no table 'tt'"),
    (("aggregate", "out", "--plot", "sweep.yaml"), "--plot must be a folder"),
    (("aggregate", "out", "--views", "no.yaml"), "no.yaml: cannot be read"),
    (("aggregate", "export", "out", "no", "--out", "a.csv"), "folder no; give a results folder"),
    (("aggregate", "export", "out", "--out", "out"), "must be a file"),
    (("aggregate", "export", "out", "--out", "a.xls"), "must end in .csv or .parquet"),
    (("aggregate", "export", "out", "--out", "no/a.csv"), "the folder 'no' does not exist"),
    (("aggregate", "compare", "out"), "no paired rounds"),
    (("aggregate", "compare", "out", "out"), "must be different folders"),
    (("aggregate", "compare", "out", "no"), NO_FOLDER),
    (("aggregate", "compare", "out", "--tolerance", "0"), "must be more than 0 and less than 1"),
    (("aggregate", "compare", "out", "--margin", "2%"), "got '2%'"),
    (("aggregate", "compare", "out", "--margin", "nan"), "got 'nan'"),
    (("aggregate", "compare", "out", "--where", "sise > 1"), "'sise' is"),
    (("aggregate", "compare", "out", "--where", "size > 5"), "no run satisfies the condition"),
    (("aggregate", "compare", "out", "other"), "have no run in common"),
]
_CHECKS: list[tuple[list[str], str]] = [
    (["a"], "a reference must be FILE.py:NAME"),
    ([f"{'x' * 300}.py:f"], "there is no file 'xxxx"),
    (["a\0.py:f"], "there is no file 'a\\x00.py'"),
    (["code.py:forwrad"], "did you mean 'forward'?"),
    (["syntax.py:f"], "syntax.py:1: "),
    (["nul.py:f"], "null bytes"),
    (["latin.py:f"], "latin.py:1: "),
    (["imports.py:f"], "there is no module 'no_such_module'"),
    (["code.py:forward", "--as", "kernel"], "'kernel' is not one of"),
    (["code.py:two"], "use --as"),
    (["code.py:two", "--as", "attention"], "must take (q, k, v, is_causal), got (a, b)"),
    (["code.py:Flash", "--as", "ddp"], "is a torch.autograd.Function"),
    (["code.py:forward", "--dtype", "int8"], "'int8' is not one of"),
    (["code.py:forward", "--seq-len", "0"], "--seq-len"),
]
_SOURCES: dict[str, Content] = {
    "code.py": """\
import torch
def forward(q, k, v, is_causal): ...
def two(a, b): ...
class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal): ...
""",
    "syntax.py": "def f(",
    "nul.py": b"def f(): ...\0",
    "latin.py": b"x = 'caf\xe9'",
    "imports.py": "import no_such_module\ndef f(q, k, v): ...",
}
# A sweep with a reference, and the error. The benchmark attention checks it.
_ATTENTION = (
    "name: a\nbenchmark: attention\nfixed: {seq_len: 128, head_dim: 64, implementation: %s}\n"
)
_REFERENCES = [
    ("fsdp", "got 'fsdp'"),
    ("flash_tritn", "did you mean 'flash_triton'?"),
    ("code.py:two", "must take (q, k, v, is_causal)"),
]
_HERE: dict[str, Content] = {"sweep.yaml": HEAD + ONE, "out": results}
CASES = [
    *(Case(("jobs", "status", name), message, files) for name, files, message in _FOLDERS),
    *(Case(words, message, {**_HERE, "other": other}) for words, message in _COMMANDS),
    *(Case(("jobs", "check", *words), message, _SOURCES) for words, message in _CHECKS),
    *(
        Case(
            ("jobs.submit", "sweep.yaml", *PLAN),
            message,
            {**_SOURCES, "sweep.yaml": _ATTENTION % value},
        )
        for value, message in _REFERENCES
    ),
    Case(("jobs", "logs", "a"), "logs cannot be read: Not a directory", {"logs": ""}),
    Case(
        ("jobs.submit", "sweep.yaml", *PLAN, "--out", "out"),
        "Invalid JSON",
        {"sweep.yaml": HEAD + ONE, "out": with_manifest(b"")},
    ),
    Case(
        ("aggregate", "out", "--views", "bad.yaml"),
        "bad.yaml:4:1: ",
        {**_HERE, "bad.yaml": HEAD + ONE + "tabels: []\n"},
    ),
]
