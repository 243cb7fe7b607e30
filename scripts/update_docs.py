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
BEGIN, END = "<!-- output of:", "<!-- end -->"
BLOCK = re.compile(
    r"(?P<begin><!-- output of: (?P<command>.+?) -->\n).*?(?P<end><!-- end -->)", re.S
)


def main() -> None:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        raise SystemExit(f"arguments must be --check or none, got {' '.join(sys.argv[1:])}")
    outdated = []
    for page in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        name = str(page.relative_to(ROOT))
        old = page.read_bytes().decode("utf-8")  # keeps the line ends
        blocks = list(BLOCK.finditer(old))
        if not len(blocks) == old.count(BEGIN) == old.count(END):
            raise SystemExit(
                f"{name}: each line '{BEGIN} COMMAND -->' needs a line '{END}' before the next "
                f"block; got {old.count(BEGIN)} and {old.count(END)}, of which {len(blocks)} match"
            )
        try:
            new = BLOCK.sub(filled, old)
        except (subprocess.CalledProcessError, ValueError) as error:
            raise SystemExit(f"{name}: {error}") from None
        if new != old:
            outdated.append(name)
            if not check:
                page.write_bytes(new.encode("utf-8"))
    if outdated:
        verb = "out of date, run make docs" if check else "updated"
        print(f"{verb}: {', '.join(outdated)}")
    raise SystemExit(1 if check and outdated else 0)


def filled(block: re.Match[str]) -> str:
    return f"{block['begin']}\n{output(block['command'])}\n\n{block['end']}"


def output(command: str) -> str:
    """Run a command of the form `python SCRIPT ...`, and return the text that it prints.

    Raises:
        ValueError: if the command does not begin with `python`, or prints a marker of a block.
        CalledProcessError: if the command fails. `compare` does not fail if runs are slower.
    """
    python, *arguments = shlex.split(command)
    if python != "python":
        raise ValueError(f"the command of a block must begin with python, got {command!r}")
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    # The codes 1 and 3 of `compare` are about its verdicts, if it prints any.
    has_verdicts = arguments[:2] == ["aggregate.py", "compare"] and "| verdict" in done.stdout
    if not (has_verdicts and done.returncode in (1, 3)):
        done.check_returncode()
    if BEGIN in done.stdout or END in done.stdout:
        raise ValueError(f"the output of a command must not contain markers: {command!r}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
