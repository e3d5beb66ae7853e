"""Remove from an export what must not leave the sandbox, and report where it was, never what it was.

Files are examined while they are read. Only a file with a finding is read again and written, without the finding, to
the scratch folder. The sandbox's own files are never written to.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Dict, Iterator, List, NamedTuple, Tuple

from sidecar.format.protocol import ExportAnswer, PrivateFinding
from sidecar.program import places
from sidecar.program.privacy import credentials
from sidecar.program.privacy.expressions import Expression

if TYPE_CHECKING:
    from sidecar.program.privacy.passages import PrivateFilter

CHUNK = 1 << 20
OVERLAP = 8 * 1024
WINDOW = 1 << 20
"""Files are examined in windows of this size: the smaller they are, the more is examined twice."""
TRIES = 3
MOST_FINDINGS = 200
MOST_PATHS = 1000
OFF, WARN, REDACT, REFUSE = "off", "warn", "redact", "refuse"
ACTIONS = {WARN: "warned", REDACT: "redacted", REFUSE: "refused"}
TEXT_ENDS = (".md", ".txt", ".json", ".jsonl", ".ndjson", ".yaml", ".yml", ".toml", ".csv", ".log", ".xml", ".html")


# What a tag may begin with, plain or escaped, by bytes that are not frequent in text: found as credentials are.
_TAGS = ((b"<", Expression(rb"<(?=[pP\s\\])")), (b"3", Expression(rb"3(?=[cC])(?<=\\u003)")))


class PrivacyPolicy(NamedTuple):
    """What to do for the files of one layout: with private passages, and with credentials."""

    remove: bool
    credentials: str
    rules: credentials.Rules = ()
    """The user's own kinds of credentials."""

    @property
    def takes_out(self) -> bool:
        """Whether something is removed or redacted."""
        return self.remove or self.credentials == REDACT

    @property
    def strict(self) -> bool:
        """Whether anything must not leave."""
        return self.takes_out or self.credentials == REFUSE

    @property
    def without_warnings(self) -> PrivacyPolicy:
        """The same policy without findings that are only warned about."""
        return self._replace(credentials=OFF if self.credentials == WARN else self.credentials)

    def may_concern(self, data: bytes) -> bool:
        """Return whether these bytes contain anything that the policy is about."""
        return any(found for _, found in self.find_traces(data))

    def find_traces(self, data: bytes) -> Iterator[Tuple[int, bool]]:
        """Yield where there is what private passages and credentials are found by, and whether one is there, as the data
        is. Elsewhere there is none in any part of the data, wherever that begins and ends."""
        if self.remove and any(credentials.has_candidate(data, *tag) for tag in _TAGS):
            from sidecar.program.privacy import passages

            yield from passages.find_traces(data)
        if self.credentials != OFF:
            yield from credentials.find_traces(data, self.rules)

    def may_begin(self, data: bytes) -> bool:
        """Return whether something begins in these bytes that may be told by what is far behind it: a private passage, a
        private key."""
        if self.credentials != OFF and credentials.may_begin_key(data):
            return True
        return self.remove and self._replace(credentials=OFF).may_concern(data)


class Watch:
    """Watches the bytes of a file while they are read.

    With ``looked_at``, what the base has was looked at by the same policy: of that only what may go on is of interest, and
    what is close to something new. (Not where findings are only warned about, which is done again each time.)
    """

    def __init__(self, policy: PrivacyPolicy, looked_at: bool = False) -> None:
        self._policy = policy
        self._looked_at = looked_at and policy.credentials != WARN
        self._hit = self.binary = False
        self.begin()

    def begin(self) -> None:
        """A file is read from its beginning."""
        self._waiting: List[bytes] = []
        self._weight = 0

    def inspect(self, data: bytes, known: bool) -> None:
        """Take the next bytes; they are examined when there are enough. ``known``: they are as the base has them."""
        self.binary = self.binary or b"\0" in data
        if self._hit:
            return
        if known and self._looked_at and not self._policy.may_begin(b"".join(self._waiting[-1:]) + data):
            if self._weight:
                self._waiting.append(data[:OVERLAP])
                self._examine()
            self._waiting = [data[-OVERLAP:]]
            return
        self._waiting.append(data)
        self._weight += len(data)
        if self._weight >= WINDOW:
            self._examine()

    @property
    def hit(self) -> bool:
        """Whether there is anything that the policy is about in what was read."""
        if self._weight:
            self._examine()
        return self._hit

    def _examine(self) -> None:
        """Examine what waits, and keep the end of it, so that a finding across two windows is seen."""
        data = b"".join(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
        self._hit = self._hit or self._policy.may_concern(data)
        self._waiting, self._weight = [data[-OVERLAP:]], 0


class ScrubbedText:
    """One text being scrubbed: feed it in pieces. ``taken`` counts private passages and redacted credentials."""

    def __init__(self, policy: PrivacyPolicy, in_json: bool, binary: bool = False) -> None:
        """``binary``: credentials are replaced by as many bytes."""
        self.rows: List[Tuple[int, str, str]] = []
        self.more: Dict[str, int] = {}
        """Findings that are not in the list, counted by action."""
        self.unclosed = self.mentioned = 0
        """The line of a private passage that is never closed, and of a tag that is only mentioned; 0 if there is none."""
        self.taken = [0, 0]
        self._policy = policy
        self._private: PrivateFilter | None = None
        if policy.remove:
            from sidecar.program.privacy import passages

            self._private = passages.PrivateFilter(in_json, self._count_passage)
        redact = policy.credentials == REDACT
        self._credentials = (
            credentials.CredentialFilter(redact, self._count_credential, policy.rules, binary)
            if policy.credentials != OFF
            else None
        )

    def feed(self, data: bytes, last: bool = False) -> bytes:
        """Take a piece and return scrubbed text."""
        if self._private is not None:
            data = self._private.feed(data, last)
        return self._credentials.feed(data, last) if self._credentials is not None else data

    def _count_passage(self, line: int, name: str) -> None:
        from sidecar.program.privacy import passages

        if name == passages.MENTIONED:
            self.mentioned = self.mentioned or line
            return
        self.taken[0] += 1
        self._add(line, name, "removed")
        self.unclosed = self.unclosed or (line if name == passages.UNCLOSED else 0)

    def _count_credential(self, line: int, name: str) -> None:
        self.taken[1] += self._policy.credentials == REDACT
        self._add(line, name, ACTIONS[self._policy.credentials])

    def _add(self, line: int, name: str, action: str) -> None:
        if len(self.rows) < MOST_FINDINGS:
            self.rows.append((line, name, action))
        else:
            self.more[action] = self.more.get(action, 0) + 1


def scrub_text(data: bytes, policy: PrivacyPolicy, binary: bool = False) -> Tuple[bytes, ScrubbedText]:
    """Return a text in memory as it may leave, and what was found."""
    from sidecar.program.privacy.passages import holds_json

    text = ScrubbedText(policy, policy.remove and holds_json(data), binary)
    return text.feed(data, True), text


def scrub_file(place: str, target: str, policy: PrivacyPolicy, binary: bool = False) -> Tuple[ScrubbedText, bool]:
    """Write a file to ``target`` as it may leave. Return what was found, and whether the file was unchanged while it
    was read."""
    from sidecar.program.privacy.passages import is_json

    for _ in range(TRIES):
        descriptor = places.open_file(place)
        with open(descriptor, "rb") as source, open(target, "wb") as out:
            before = os.fstat(descriptor)
            left = before.st_size
            chunk = source.read(min(CHUNK, left))
            text = ScrubbedText(policy, is_json(place), binary)
            while chunk:
                left -= len(chunk)
                out.write(text.feed(chunk))
                chunk = source.read(min(CHUNK, left))
            out.write(text.feed(b"", True))
            after = os.fstat(descriptor)
        steady = not left and (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
        if steady:
            break
    return text, steady


class PrivacyReport:
    """What was found and done: counts of everything, places of the first findings."""

    def __init__(self) -> None:
        self.rows: List[PrivateFinding] = []
        self.more = 0
        self.refused = 0
        self.taken: Dict[str, List[int]] = {}
        self.taken_more = [0, 0]
        self.counts: Dict[str, int] = {}
        self.warnings: List[str] = []

    def add(self, path: str, name: str, action: str, line: int = 0, column: str = "", row: str = "") -> None:
        """Add one finding."""
        self.refused += action == ACTIONS[REFUSE]
        self.counts[action] = self.counts.get(action, 0) + 1
        if len(self.rows) < MOST_FINDINGS:
            shown = credentials.redact_name(path)[0]
            self.rows.append(PrivateFinding(shown, name, action, line, *(("", "") if line else (column, row))))
        else:
            self.more += 1

    def add_more(self, more: Dict[str, int]) -> None:
        """Add findings that were only counted."""
        for action, count in more.items():
            self.refused += count if action == ACTIONS[REFUSE] else 0
            self.counts[action] = self.counts.get(action, 0) + count
            self.more += count

    def take(self, path: str, taken: List[int]) -> None:
        """Record how many private passages and credentials were removed from a file."""
        if taken == [0, 0]:
            return
        if len(self.taken) < MOST_PATHS:
            self.taken[path] = taken
        else:
            self.taken_more = [self.taken_more[0] + taken[0], self.taken_more[1] + taken[1]]

    def text(self, path: str, text: ScrubbedText) -> None:
        """Add the findings of a scrubbed text."""
        for line, name, action in text.rows:
            self.add(path, name, action, line)
        self.add_more(text.more)
        self.take(path, text.taken)

    def tell(self, answer: ExportAnswer) -> None:
        """Put the report into the answer."""
        answer.warnings += self.warnings
        answer.findings = self.rows
        answer.findings_more = self.more
        answer.found = self.counts
        answer.taken = {path: (taken[0], taken[1]) for path, taken in self.taken.items()}
        answer.taken_more = self.taken_more[0], self.taken_more[1]
