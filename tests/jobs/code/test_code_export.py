"""Files of a revision or of the working tree, written to a folder by real git."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jobs.code.export import export_revision, export_working_tree, hash_of
from jobs.code.state import is_tracked
from tests.jobs.checkout import Checkout


@pytest.fixture
def own(tmp_path: Path) -> Checkout:
    """A repository with edits of each kind. Git would quote its path in lists of paths."""
    own = Checkout(tmp_path / 'a:b "ö"')
    own.write(".gitattributes", "*.py export-ignore\nid.txt export-subst\ndos.txt text eol=crlf\n")
    own.write("id.txt", "$Format:%H$\n")
    own.write("dos.txt", "one\n")
    own.write("run.sh", "#!/bin/sh\n").chmod(0o755)
    own.write("logs/result", "1\n")
    (own.folder / "link").symlink_to("nowhere")
    own.commit(edited="old\n", deleted="old\n")
    own.write("edited.py", "new\n")
    (own.folder / "deleted.py").unlink()
    own.write("staged.py", "old\n")
    own.git("add", "staged.py")
    own.write("staged.py", "new\n")
    own.write("intended.py", "new\n")
    own.git("add", "--intent-to-add", "intended.py")
    own.write("untracked.py", "")
    return own


def contents(folder: Path) -> dict[str, bytes | str]:
    """Return the content of each file, or the target of each link."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


SAME = {
    ".gitattributes": b"*.py export-ignore\nid.txt export-subst\ndos.txt text eol=crlf\n",
    "id.txt": b"$Format:%H$\n",
    "run.sh": b"#!/bin/sh\n",
    "link": "nowhere",
}
EDITED = dict.fromkeys(("edited.py", "staged.py", "intended.py"), b"new\n")
OLD = {"edited.py": b"old\n", "deleted.py": b"old\n", "logs/result": b"1\n"}


def test_a_tree_is_written_and_the_repository_stays(own: Checkout, tmp_path: Path) -> None:
    """Also if git holds a lock. Hooks are not executed."""
    hook = own.write(".git/hooks/post-index-change", f"#!/bin/sh\ntouch {tmp_path / 'executed'}\n")
    hook.chmod(0o755)
    own.write(".git/index.lock", "")
    own.git("config", "core.safecrlf", "true")
    before = contents(own.folder)
    export_working_tree(own.folder, tmp_path / "now", ["logs", "no-such-file"])
    assert contents(tmp_path / "now") == SAME | EDITED | {"dos.txt": b"one\n"}
    assert (tmp_path / "now/run.sh").stat().st_mode & 0o100
    assert not (tmp_path / "now/edited.py").stat().st_mode & 0o111
    export_revision(own.folder, tmp_path / "old", "HEAD")
    assert contents(tmp_path / "old") == SAME | OLD | {"dos.txt": b"one\r\n"}  # as in a checkout
    assert contents(own.folder) == before and not (tmp_path / "executed").exists()


def test_the_working_tree_is_copied_as_it_is(own: Checkout, tmp_path: Path) -> None:
    """Also files that git would write with other contents, or not at all."""
    own.git("config", "filter.zero.clean", "sed s/new/old/")
    own.write(".git/info/attributes", "intended.py filter=zero\n")
    own.git("update-index", "--skip-worktree", "edited.py")
    own.git("update-index", "--assume-unchanged", "staged.py")
    export_working_tree(own.folder, tmp_path / "now", ["logs"])
    assert contents(tmp_path / "now") == SAME | EDITED | {"dos.txt": b"one\n"}


def test_equal_copies_have_equal_hashes(own: Checkout, tmp_path: Path) -> None:
    def found(name: str) -> str:
        export_working_tree(own.folder, tmp_path / name, ["logs"])
        return hash_of(tmp_path / name)

    tree = found("first")
    own.write("logs/result", "2\n")
    assert found("again") == tree
    (own.folder / "run.sh").chmod(0o644)
    assert found("other") != tree


def test_files_of_submodules_as_they_are(own: Checkout, tmp_path: Path) -> None:
    library = Checkout(tmp_path / "library")
    library.commit(lib="old\n")
    allow = ("-c", "protocol.file.allow=always")
    own.git(*allow, "submodule", "--quiet", "add", str(library.folder), "inner/lib")
    assert is_tracked(own.folder, "inner/lib/lib.py") and is_tracked(own.folder, "id.txt")
    assert not is_tracked(own.folder, "inner/lib/other.py")
    export_working_tree(own.folder, tmp_path / "first")
    own.write("inner/lib/lib.py", "new\n")
    export_working_tree(own.folder, tmp_path / "second")
    found = [contents(tmp_path / name)["inner/lib/lib.py"] for name in ("first", "second")]
    assert found == [b"old\n", b"new\n"]
