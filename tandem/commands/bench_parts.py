"""What the commands of `tandem bench` share: lists on the command line, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 160  # columns of a table that is written to a file


def names(text: str, flag: str, valid: tuple[str, ...] | None = None) -> list[str]:
    """A comma-separated list. Raises UsageError."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        if valid is not None and name not in valid:
            raise UsageError(f"{flag} {name}: the valid names are {', '.join(valid)}")
    return found


def numbers(text: str, flag: str) -> list[int]:
    """A comma-separated list of whole numbers of at least 1. Raises UsageError."""
    found = names(text, flag)
    for name in found:
        if not name.isdigit() or int(name) < 1:
            raise UsageError(f"{flag} {name}: not a whole number of at least 1")
    return [int(name) for name in found]


def report_console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def print_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.table import Table

    grid = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        grid.add_column(column, justify="right")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)
