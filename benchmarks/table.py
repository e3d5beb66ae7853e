"""Figures, and a table of them for people."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Section:
    """One thing measured: rows of a name, what the sidecar needs, and what to hold it against."""

    title: str
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, name: str, ours: str, beside: str = "") -> None:
        self.rows.append((name, ours, beside))

    def markdown(self) -> str:
        rows = [("", "sidecar", "beside it"), *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
        ]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return f"## {self.title}\n\n" + "\n".join(lines) + "\n"


def seconds(value: float) -> str:
    return f"{value:.2f} s"


def size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"
