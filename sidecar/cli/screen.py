"""Output to a terminal: lines, tables, and a progress bar for steps that take longer than ``PATIENCE_SECONDS``.

Everything that people see on stdout and stderr passes through here, and what is not printable is escaped.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from typing import TYPE_CHECKING

from sidecar.cli.result import Line, Result, Table
from sidecar.host.text import make_printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

PATIENCE_SECONDS = 1.0
COLOURS = {"red": "\x1b[31m", "green": "\x1b[32m", "yellow": "\x1b[33m", "bold": "\x1b[1m", "dim": "\x1b[2m"}


def show_result(result: Result) -> None:
    """Print a result for people."""
    for item in result.words:
        if isinstance(item, Line):
            print(_paint(item))
        elif isinstance(item, str):
            print(make_printable(item))
        elif not item.rows:
            print(make_printable(item.empty))
        else:
            _show_table(item)


def _paint(line: Line) -> str:
    """Return a line as it is printed. The colour is added after everything else was made printable."""
    text = make_printable(line.expandtabs(4))
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    text = text if len(text) <= width else f"{text[: max(1, width - 1)]}…"
    colour = "" if os.environ.get("NO_COLOR") else COLOURS.get(line.colour, "")
    return f"{colour}{text}\x1b[0m" if colour else text


def _show_table(table: Table) -> None:
    cells = [[make_printable(cell) for cell in row] for row in [table.columns, *table.rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.columns))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_error(text: str) -> None:
    """Print a line on stderr."""
    print(make_printable(f"memory-sidecar: {text}"), file=sys.stderr)


class _LineFormatter(logging.Formatter):
    """Formats each log record as one printable line."""

    def format(self, record: logging.LogRecord) -> str:
        return make_printable(super().format(record))


def route_logs() -> None:
    """Make records that are logged before logging is configured come out on stderr as printable lines too."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_LineFormatter())


class ProgressBar:
    """A bar that appears if a command takes longer than ``PATIENCE_SECONDS``, and is removed at the end."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, Task, TextColumn, TimeElapsedColumn
        from rich.text import Text

        class Amount(DownloadColumn):
            def render(self, task: Task) -> Text:
                return Text() if task.total is None else super().render(task)

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), Amount(), TimeElapsedColumn())
        self._bar: Bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task: TaskID | None = None
        self._patience = threading.Timer(PATIENCE_SECONDS, self._bar.start)
        self._patience.daemon = True

    def __enter__(self) -> ProgressBar:
        self._patience.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patience.cancel()
        self._patience.join()
        self._bar.stop()

    def about(self, snapshot: str) -> None:
        return None

    def step(self, name: str, total: int | None = None) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(make_printable(name), total=total)

    def advance(self, count: int) -> None:
        if self._task is not None:
            self._bar.advance(self._task, count)


def is_terminal() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr.isatty()
