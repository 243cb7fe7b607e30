"""Markdown tables, which fit the width of a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from jobs.formatting import UNLIMITED, counted, wrapped


def markdown_table(
    columns: dict[str, list[str]],
    align: str = "right",
    width: int = UNLIMITED,
    least: Sequence[str] = (),
    see: str = "--format csv",
) -> str:
    """Return a Markdown table, with all columns aligned "left", "center" or "right".

    A table with lines of more than `width` characters is changed until it fits: Columns with the
    same cell in all rows become a line below it. Then the columns in `least` are left out, one
    after another, and a line tells how many, and that `see` has them. If that is not enough, the
    rows become a list with all cells that are not empty.
    """
    table = _table(columns, align)
    if _fits(table, width):
        return table
    same = {name: cells[0] for name, cells in columns.items() if len(set(cells)) == 1 < len(cells)}
    shown = {name: cells for name, cells in columns.items() if name not in same} or dict(columns)
    below = [_pairs("the same in all rows: ", same.items(), width)] if same else []
    rows = [dict(zip(shown, row, strict=True)) for row in zip(*shown.values(), strict=True)]
    table, absent = _table(shown, align), 0
    for name in least:
        if not _fits(table, width) and shown.pop(name, None) is not None:
            table, absent = _table(shown, align), absent + 1
    if not _fits(table, width):
        lists = ([(name, cell) for name, cell in row.items() if cell] for row in rows)
        table = "\n".join(_pairs("- ", cells, width) for cells in lists)
    elif absent:
        below.append(wrapped(f"{counted(absent, 'column')} not shown: {see} has all", width))
    return "\n\n".join([table, *below])


def compact_table(columns: dict[str, list[str]]) -> str:
    """Return a Markdown table without the spaces that align its columns, half of its bytes."""
    rows = [list(map(_escaped, row)) for row in (columns, *zip(*columns.values(), strict=True))]
    first, *others = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([first, f"|{'--:|' * len(columns)}", *others])


def _fits(text: str, width: int) -> bool:
    return all(len(line) <= width for line in text.splitlines())


def _pairs(start: str, cells: Iterable[tuple[str, str]], width: int) -> str:
    """Return names and cells on lines that are broken only within cells that are too wide."""
    pairs = [f"{name.strip()}: {cell or '–'}".replace("\n", " ") for name, cell in cells]
    joined = [p if len(p) > width - len("- ") else p.replace(" ", "\xa0") for p in pairs]
    return wrapped(start + "  ".join(joined), width, "  ").replace("\xa0", " ")


def _table(columns: dict[str, list[str]], align: str) -> str:
    """Return a Markdown table of any width.

    Special characters are escaped. For example, names of kernels can contain `|`, `<` and `*`.
    """
    table = tabulate(
        [list(map(_escaped, row)) for row in zip(*columns.values(), strict=True)],
        headers=list(map(_escaped, columns)),
        tablefmt="pipe",
        disable_numparse=True,
        colalign=[align] * len(columns),
    )
    return str(table)


def _escaped(text: str) -> str:
    # A `<` before any other character does not begin a tag of HTML.
    return re.sub(r"([\\|*`]|<(?=[A-Za-z/!?]))", r"\\\1", text).replace("\n", " ")
