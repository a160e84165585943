"""Results as text for a terminal, and as the generated parts of a Markdown document.

A document's parts stand between `<!-- generated: NAME -->` and `<!-- end: NAME -->`; what is around them is written by
people and left alone.
"""

from pathlib import Path

from bench.compare import tables
from bench.compare.results import Results
from bench.compare.tables import Table

PICTURE = "![CPU, added time and memory of each proxy](performance.png)"
DOCUMENT = """\
# Performance

<!-- generated: aims -->
<!-- end: aims -->

<!-- generated: figures -->
<!-- end: figures -->

<!-- generated: run -->
<!-- end: run -->
"""


def text(results: Results) -> str:
    """Everything, the aims last: they are what a terminal still shows."""
    made = [tables.run(results), tables.arms(results), *tables.figures(results), tables.aims(results)]
    return "\n\n".join(_plain(table) for table in made)


def write(results: Results, document: Path) -> None:
    """Fill the document's parts; one that is not there is made, with nothing else in it."""
    said = document.read_text() if document.exists() else DOCUMENT
    parts = {
        "aims": _markdown(tables.aims(results)),
        "figures": "\n\n".join([PICTURE, *(_markdown(table, heading=True) for table in tables.figures(results))]),
        "run": "\n\n".join(_markdown(table) for table in (tables.run(results), tables.arms(results))),
    }
    for name, part in parts.items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        before, began, rest = said.partition(begin)
        _, ended, after = rest.partition(end)
        if not began or not ended:
            raise ValueError(f"{document}: no place between {begin} and {end}")
        said = f"{before}{begin}\n\n{part}\n\n{end}{after}"
    document.write_text(said)


def _plain(table: Table) -> str:
    rows = [table.header, *table.rows] if any(table.header) else table.rows
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.header))]
    lines = [table.title, *("  " + "  ".join(_fit(row, widths)).rstrip() for row in rows)]
    return "\n".join([*lines, *(f"  {note}" for note in table.notes)])


def _markdown(table: Table, *, heading: bool = False) -> str:
    rows = [tuple(cell.replace("|", "\\|") for cell in row) for row in [table.header, *table.rows]]
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(table.header))]
    lines = [f"### {table.title[0].upper()}{table.title[1:]}\n"] if heading else []
    lines.append(_row(_fit(rows[0], widths)))
    lines.append("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    lines += [_row(_fit(row, widths)) for row in rows[1:]]
    return "\n".join([*lines, *(f"\n{note}" for note in table.notes)])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _fit(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
