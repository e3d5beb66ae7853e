"""Check the chains of an audit: that no line was removed, altered, moved or put in another place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sidecar.audit.lines import Kind, Line, compute_digest, decode_line
from sidecar.host.values import dataclass
from sidecar.ids import AUDIT_DIGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong with a chain."""

    chain: str
    problem: str
    where: str = ""
    """The object, or the place in a file."""
    line: int = 0
    """The line that it is about, or the first of them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Lines of a chain as they were found in one place, and what the name of the place says of them."""

    where: str
    data: bytes
    first: int
    last: int
    digest: str
    """How the digest of the last line begins."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What a chain has at least: so many lines, of which the last has this digest."""

    lines: int
    digest: str


@dataclass(frozen=True, slots=True)
class Cut:
    """Up to which line a chain was allowed to lose its first lines, and how the digest of the last of those begins."""

    through: int
    digest: str


@dataclass(slots=True)
class _Numbered:
    data: bytes
    line: Line
    where: str


class ChainCheck:
    """Puts the pieces of one chain together and collects what is wrong with it."""

    def __init__(self, chain: str) -> None:
        self.chain = chain
        self.findings: list[Finding] = []
        self._lines: dict[int, _Numbered] = {}

    @property
    def known(self) -> Sequence[Line]:
        """The lines that were taken so far."""
        return [row.line for row in self._lines.values()]

    def report(self, problem: str, where: str = "", line: int = 0) -> None:
        self.findings.append(Finding(chain=self.chain, problem=problem, where=where, line=line))

    def add_piece(self, piece: Piece) -> None:
        """Take the lines of one object, which has to hold what its name says."""
        rows, rest = piece.data.split(b"\n")[:-1], piece.data.rpartition(b"\n")[2]
        wanted = piece.last - piece.first + 1
        if rest or len(rows) != wanted:
            whole = f"{len(rows)} whole lines instead of {wanted}"
            self.report(f"It has {whole}: lines were removed from it, or added.", piece.where, piece.first)
        elif not compute_digest(rows[-1]).startswith(piece.digest):
            self.report("Its last line is not the one that it was written with.", piece.where, piece.last)
        for place, row in enumerate(rows):
            self.add_line(row, piece.where, piece.first + place)

    def add_line(self, data: bytes, where: str, number: int = 0) -> None:
        """Take one line, which has to have this number, if one is given."""
        try:
            line = decode_line(data)
        except ValueError as problem:
            self.report(f"A line is {problem}.", where, number)
            return
        if line.chain != self.chain:
            self.report("A line of another chain stands here.", where, number)
        elif number and line.n != number:
            self.report(f"Line {line.n} stands in the place of line {number}.", where, number)
        elif (known := self._lines.get(line.n)) is not None and known.data != data:
            self.report(f"Line {line.n} has two versions, here and in {known.where}.", where, line.n)
        else:
            self._lines[line.n] = _Numbered(data, line, where)

    def finish(self, tail: Tail | None, cut: Cut | None, *, needs_tail: bool, whole: bool = True) -> list[Line]:
        """Check that the lines follow each other, to the end that the tail names. Return them.

        ``whole``: all chains were read, so it is known which lines were cut off.
        """
        rows = [self._lines[number] for number in sorted(self._lines)]
        if not whole and cut is None and rows:
            cut = Cut(rows[0].line.n - 1, "")
        self._check_sequence(rows, cut)
        last = rows[-1].line.n if rows else (cut.through if cut else 0)
        if tail is None:
            if needs_tail:
                self.report("Its tail is missing, which says how many lines there are.")
        elif tail.lines > last:
            self.report(f"Lines {last + 1} to {tail.lines} are missing at its end.", line=last + 1)
        elif (row := self._lines.get(tail.lines)) is not None and compute_digest(row.data) != tail.digest:
            self.report(f"Line {tail.lines} is not the one that its tail names.", row.where, tail.lines)
        closed = [row for row in rows if row.line.kind == Kind.CLOSED]
        if closed and closed[0].line.n != last:
            self.report("There are lines after its end.", closed[0].where, closed[0].line.n + 1)
        return [row.line for row in rows]

    def _check_sequence(self, rows: Sequence[_Numbered], cut: Cut | None) -> None:
        before: _Numbered | None = None
        for row in rows:
            number, expected = row.line.n, before.line.n + 1 if before else 1
            allowed = cut is not None and number - 1 <= cut.through
            if number != expected and not allowed:
                missing = f"Line {expected} is" if number == expected + 1 else f"Lines {expected} to {number - 1} are"
                self.report(f"{missing} missing.", row.where, expected)
            elif number != expected and cut is not None:
                if number - 1 == cut.through and not row.line.prev.startswith(cut.digest):
                    self.report(f"Line {number} does not follow the one that was cut off.", row.where, number)
            elif row.line.prev != (compute_digest(before.data) if before else ""):
                said = f"Line {number} does not follow line {number - 1}" if before else "Line 1 follows another line"
                self.report(f"{said}: one of the two was altered.", row.where, number)
            before = row


def find_cuts(lines: Iterable[Line]) -> Mapping[str, Cut]:
    """Return how far each chain was cut, by what all chains say."""
    cuts: dict[str, Cut] = {}
    for line in lines:
        if line.kind == Kind.CUT and (line.cut not in cuts or line.through > cuts[line.cut].through):
            cuts[line.cut] = Cut(line.through, line.digest[:AUDIT_DIGEST])
    return cuts
