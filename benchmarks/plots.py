"""Plots as SVG: lines over a count, drawn with nothing but text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 120, 40, 44
COLORS = ("#0b6bcb", "#c7502c", "#5a8f29", "#7b4fa3")
TICKS = 5


def draw(title: str, across: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return an SVG with one line for each name, through its points, from zero on."""
    points = [point for line in lines.values() for point in line]
    widest = max((x for x, _ in points), default=1) or 1
    highest = _round_up(max((y for _, y in points), default=1) or 1)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return round(LEFT + wide * x / widest, 1), round(TOP + high * (1 - y / highest), 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(across)}</text>',
    ]
    for number in range(TICKS + 1):
        x, y = place(widest * number / TICKS, highest * number / TICKS)
        out.append(f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + wide}" y2="{y}" stroke="#dddddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{highest * number / TICKS:g}</text>')
        out.append(f'<text x="{x}" y="{TOP + high + 18}" text-anchor="middle">{widest * number / TICKS:g}</text>')
    for number, (name, line) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line))
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        x, y = TOP + 16 * number, WIDTH - RIGHT + 12
        out.append(f'<line x1="{y}" y1="{x}" x2="{y + 16}" y2="{x}" stroke="{color}" stroke-width="2"/>')
        out.append(f'<text x="{y + 22}" y="{x + 4}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _round_up(value: float) -> float:
    """Return the next number that has one digit, or one and a half."""
    unit = 1.0
    while unit * 10 < value:
        unit *= 10
    while unit > value:
        unit /= 10
    return next(unit * step for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if unit * step >= value)
