"""Update the generated blocks in the Markdown pages, or check that they are up to date.

python scripts/update_docs.py            # make docs
python scripts/update_docs.py --check    # exit with 1 and list the pages that are out of date

Each block shows the output of a command. The command runs in the root of the repository:

    <!-- output of: python aggregate.py logs/h200/flash_leaderboard --table rules -->
    ...
    <!-- end -->
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/*.md"]
BLOCK = re.compile(
    r"(?P<begin><!-- output of: (?P<command>.+?) -->\n).*?(?P<end><!-- end -->)", re.S
)


def main() -> None:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        raise SystemExit(f"arguments must be --check or none, got {' '.join(sys.argv[1:])}")
    outdated = []
    for page in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        old = page.read_text(encoding="utf-8")
        new = BLOCK.sub(filled, old)
        if new != old:
            outdated.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(new, encoding="utf-8")
    if outdated:
        verb = "out of date, run make docs" if check else "updated"
        print(f"{verb}: {', '.join(outdated)}")
    raise SystemExit(1 if check and outdated else 0)


def filled(block: re.Match[str]) -> str:
    return f"{block['begin']}\n{output(block['command'])}\n\n{block['end']}"


def output(command: str) -> str:
    """Run a command of the form `python SCRIPT ...`, and return the text that it prints.

    Raises:
        SystemExit: if the command does not begin with `python`.
        CalledProcessError: if the command fails.
    """
    python, *arguments = shlex.split(command)
    if python != "python":
        raise SystemExit(f"the command of a block must begin with python, got {command!r}")
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
