"""The difference of two texts, in bounded time whatever the texts are."""

from __future__ import annotations

MOST_LINES = 400
"""If more lines than this differ on a side, no lines in common are looked for among them."""
MOST_SHOWN = 2000
CONTEXT = 2


def diff_texts(old: str, new: str) -> list[str]:
    """Return the lines that differ, each after ``-``, ``+`` or, for lines around them, a blank; ``…`` for what is left out."""
    before, after = old.splitlines(), new.splitlines()
    start = 0
    while start < min(len(before), len(after)) and before[start] == after[start]:
        start += 1
    end = 0
    while end < min(len(before), len(after)) - start and before[-1 - end] == after[-1 - end]:
        end += 1
    context = max(0, start - CONTEXT)
    tail = after[len(after) - end : len(after) - end + CONTEXT] if end else []
    gone, come = before[start : len(before) - end], after[start : len(after) - end]
    lines = [f" {line}" for line in after[context:start]]
    if len(gone) > MOST_LINES or len(come) > MOST_LINES:
        lines += [*(f"-{line}" for line in gone), *(f"+{line}" for line in come)]
    else:
        lines += _diff_lines(gone, come)
    lines += [f" {line}" for line in tail]
    return lines if len(lines) <= MOST_SHOWN else [*lines[:MOST_SHOWN], "…"]


def _diff_lines(gone: list[str], come: list[str]) -> list[str]:
    import difflib  # late: most comparisons have no text to show

    lines: list[str] = []
    matcher = difflib.SequenceMatcher(None, gone, come, autojunk=False)
    for act, i, k, j, m in matcher.get_opcodes():
        if act == "equal":
            same = gone[i:k]
            far = len(same) > 2 * CONTEXT + 1
            shown = [*same[:CONTEXT], None, *same[-CONTEXT:]] if far else same
            lines += ["…" if line is None else f" {line}" for line in shown]
        else:
            lines += [*(f"-{line}" for line in gone[i:k]), *(f"+{line}" for line in come[j:m])]
    return lines
