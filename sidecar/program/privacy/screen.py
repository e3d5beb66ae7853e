"""The privacy screen: every file of an export that is read passes here and continues as it may leave.

For a database that SQLite cannot read, ``may_hold`` decides from the raw bytes whether it contains, or may contain,
what must not leave. A value continues from page to page, and without SQLite the chain cannot be followed. So a tag that
is cut by a page's end is recognised by its parts: one is at the beginning of a page, after the number of the next page,
and the other is anywhere.
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import TYPE_CHECKING, Callable, Dict, Iterable, List, Set

from sidecar.format.protocol import PrivacyRules, PrivacyTable
from sidecar.program.cache import KnownEntry
from sidecar.program.capture import reader
from sidecar.program.capture.walk import FoundPath, Skipped
from sidecar.program.privacy import credentials
from sidecar.program.privacy.scrub import (
    ACTIONS,
    CHUNK,
    OFF,
    OVERLAP,
    REDACT,
    PrivacyPolicy,
    PrivacyReport,
    ScrubbedText,
    Watch,
    scrub_file,
    scrub_text,
)
from sidecar.program.privacy.scrub import TEXT_ENDS as TEXTS

if TYPE_CHECKING:
    from sidecar.program.sqlite.backup import CheckedCopy

BINARY = "not a text, but it holds what is private, which cannot be taken out of it"
NAMED = "a credential is in its name, and no name can be redacted"
PRIVATE_NAME = "there is something private in its name, and no name can be cleared"
PRIVATE_LINK = "there is something private in what it links to, and no link can be cleared"
NEVER_CLOSED = (
    "%s: a <private> is never closed (line %d): what follows it was left out, to the end of the text, or of its paragraph"
    " if the tag is within a line."
)
MENTIONED = "%s: a <private> is never closed (line %d), but is only mentioned there: nothing was left out."
SETTING = "setting"
LONGEST_KEY_SHOWN = 100
LINKED = "a credential is in what it links to, and no link can be redacted"


class Screen:
    """One export's privacy settings, and what was found. ``work`` is a folder of the sidecar's."""

    def __init__(self, privacy: PrivacyRules, work: str, skipped: Skipped) -> None:
        self._privacy = privacy
        self._rules = credentials.read_rules(privacy.rules)
        self._copy = os.path.join(work, "scrubbed")
        self._work = work
        self._skipped = skipped
        self.report = PrivacyReport()
        self.took = False
        """Something was removed, or held back."""
        self._told: Set[str] = set()
        self._plain: Set[str] = set()
        """The roots none of whose names hold anything."""

    def look_over(self, found: Iterable[FoundPath]) -> None:
        """Look at many names together: nearly always there is nothing in any of them."""
        names: Dict[str, List[str]] = {}
        layouts = {}
        for one in found:
            names.setdefault(one.root.name, []).append(one.path)
            layouts[one.root.name] = one
        for root, paths in names.items():
            policy = self._choose_policy(layouts[root])
            # A rule of the user's may be about where a name ends. Names that are no UTF-8 are looked at in both ways.
            told = ("\n".join(paths).encode("utf-8", errors) for errors in ("surrogateescape", "surrogatepass"))
            if policy is None or (not self._rules and not any(map(policy.may_concern, told))):
                self._plain.add(root)

    def _find_settings(self, found: FoundPath) -> PrivacyTable:
        """Return the privacy settings of the file's layout."""
        return self._privacy.layouts.get(found.root.layout["name"], self._privacy)

    def _choose_policy(self, found: FoundPath, database: bool = False) -> PrivacyPolicy | None:
        """Return the policy for a file; ``None`` if there is nothing to do."""
        table = self._find_settings(found)
        remove, mode = table.private == "remove", table.databases if database else table.credentials
        return PrivacyPolicy(remove, mode, self._rules) if remove or mode != OFF else None

    def name(self, found: FoundPath) -> bool:
        """Return whether something of this name may leave. A folder is reported once, whatever is in it."""
        if found.root.name in self._plain:
            return True
        path, mode = found.path, self._find_settings(found).credentials
        if self._has_private_name(found, path, PRIVATE_NAME):
            return False
        if mode == OFF or not credentials.redact_name(path, self._rules)[1]:
            return True
        before = 0
        for end in [at for at, letter in enumerate(path) if letter == "/"] + [len(path)]:
            shown, kinds = credentials.redact_name(path[:end], self._rules)
            if path[:end] not in self._told:
                self._told.add(path[:end])
                self._report_kinds(shown, kinds[before:], mode, "(name)", NAMED)
            before = len(kinds)
        return bool(mode != REDACT)

    def link(self, found: FoundPath, target: str) -> bool:
        """Return whether a link with this target may leave."""
        if self._has_private_name(found, target, PRIVATE_LINK):
            return False
        mode = self._find_settings(found).credentials
        kinds = credentials.redact_name(target, self._rules)[1] if mode != OFF else []
        self._report_kinds(found.path, kinds, mode, "(link target)", LINKED)
        return not kinds or mode != REDACT

    def _has_private_name(self, found: FoundPath, name: str, reason: str) -> bool:
        """Return whether a name contains a private passage; it is reported."""
        policy, data = PrivacyPolicy(self._find_settings(found).private == "remove", OFF), os.fsencode(name)
        if not policy.may_concern(data):
            return False
        shown = os.fsdecode(scrub_text(os.fsencode(found.path), policy)[0])
        if shown not in self._told:
            self._told.add(shown)
            self._skipped.add(shown, reason)
        self.took = True
        return True

    def _report_kinds(self, shown: str, kinds: List[str], mode: str, place: str, reason: str) -> None:
        """Report credentials in a name or a link's target; with ``redact`` the path is skipped."""
        if kinds and mode == REDACT:
            self._skipped.add(shown, reason)
            self.took = True
            return
        for kind in kinds:
            self.report.add(shown, kind, ACTIONS[mode], column=place)

    def file(self, found: FoundPath, known: KnownEntry | None, looked_at: bool) -> reader.Contents | None:
        """Return a file's contents as they may leave; ``None`` if they may not. Raise ``UnnamedDatabase``.

        ``looked_at``: what is known of it was looked at by the same policy.
        """
        policy = self._choose_policy(found)
        watch = Watch(policy, looked_at) if policy is not None else None
        contents = reader.read_changing_file(found.place, known, self._work, watch)
        if policy is None or watch is None or not watch.hit:
            return contents
        # A credential in binary data is overwritten, so that everything stays where it was; a private passage cannot be.
        binary = watch.binary and not found.relative.lower().endswith(TEXTS)
        text, steady = scrub_file(found.place, self._copy, policy, binary)
        if binary and text.taken[0]:
            contents.carried.close()
            os.unlink(self._copy)
            self._skipped.add(found.path, BINARY)
            self.took = True
            return None
        self._report_text(found, text)
        if not policy.takes_out:
            return contents
        # The contents read first may not be the ones that were found clean: another process may have written in
        # between.
        contents.carried.close()
        stream = open(self._copy, "rb")
        os.unlink(self._copy)
        clean = reader.read_stream(stream, os.fstat(stream.fileno()).st_size, known, self._work)
        if clean.carried is not stream:
            stream.close()
        return clean._replace(steady=steady)

    def text(self, found: FoundPath, data: bytes) -> bytes:
        """Return a text that was made in memory, as it may leave."""
        policy = self._choose_policy(found)
        if policy is None or not policy.may_concern(data):
            return data
        clean, text = scrub_text(data, policy)
        self._report_text(found, text)
        return clean

    def settings(self, found: FoundPath, keys: List[str]) -> None:
        """Report secrets that a layout drops from a settings file, whatever the policy is. A restore keeps the
        sandbox's own keys, so a snapshot does not count them as missing."""
        for key in keys:
            self.report.add(found.path, SETTING, "removed", column=credentials.redact_name(key)[0][:LONGEST_KEY_SHOWN])

    def note_filtered(self, contents: reader.Contents, known: KnownEntry | None) -> None:
        """Note that a file which a layout itself clears of secrets has changed: secrets may be the reason."""
        self.took = self.took or (known is not None and known.entry.digest != contents.digest)

    def _report_text(self, found: FoundPath, text: ScrubbedText) -> None:
        """Report the findings of a text."""
        self.report.text(found.path, text)
        self.took = self.took or text.taken != [0, 0]
        if text.unclosed:
            self.report.warnings.append(NEVER_CLOSED % (found.path, text.unclosed))
        if text.mentioned:
            self.report.warnings.append(MENTIONED % (found.path, text.mentioned))

    def plan_look(self, found: FoundPath, copy: str) -> Callable[[], bool] | None:
        """Return the question whether the whole copy of a database holds anything; ``None`` if nothing would follow."""
        policy = self._choose_policy(found, database=True)
        if policy is None:
            return None
        from sidecar.program.sqlite import pages

        return partial(pages.may_concern, copy, policy.find_traces, None)

    def database(
        self, found: FoundPath, copy: CheckedCopy, contents: reader.Contents, sound: bool, fresh: bool, before: bool
    ) -> bool | None:
        """Scrub the copy of a database. Return whether that changed it; ``None`` if it may not leave.

        ``fresh``: its changed blocks alone tell what was not examined yet. ``before``: the last copy was changed.
        """
        policy = self._choose_policy(found, database=True)
        if policy is None:
            return False
        from sidecar.program.privacy.tables import Unscrubbable, scrub

        changed = contents.list_changed_pages(copy.page) if fresh else None
        look = copy.read_look if changed is None else None
        try:
            taken = scrub(copy.target, found.path, policy, changed, sound, self.report, before, look)
            self.took = self.took or taken
            return taken
        except Unscrubbable as problem:
            self._skipped.add(found.path, str(problem))
            self.took = True
            return None


WORD = b"private"
EDGE = 512
"""Pages of any size begin at a multiple of it."""
NUMBER = 4
_OPEN = re.compile(rb"(?i)(?:<|003c)\s{0,64}(p(?:r(?:i(?:v(?:a(?:t(?:e(?![a-z]))?)?)?)?)?)?)")
_WHOLE = re.compile(rb"(?i)(?:0{0,2}3?c)?\s{0,64}private[\s>\\]")
_REST = re.compile(rb"(?i)(r?i?v?a?t?e)[\s>\\]")


def may_hold(place: str, policy: PrivacyPolicy) -> bool:
    """Return whether a damaged database contains something that must not leave, or if that cannot be determined."""
    begins: Set[int] = set()
    """How much of the word is somewhere at the beginning of a tag."""
    ends: Set[int] = set()
    """How much of it is missing where a page begins with the rest."""
    tail = b""
    with open(place, "rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            data = tail + chunk
            tail = chunk[-OVERLAP:]
            narrow = data.replace(b"\0", b"")  # UTF-16 text as well
            if policy.may_concern(data) or policy.may_concern(narrow):
                return True
            if not policy.remove:
                continue
            for found in (*_OPEN.finditer(data), *_OPEN.finditer(narrow)):
                begins.update(range(1, len(found.group(1)) + 1))
            for edge in range(len(data) - len(chunk), len(data), EDGE):
                start = data[edge + NUMBER : edge + NUMBER + 128].replace(b"\0", b"")
                rest = _REST.match(start)
                if rest is not None and WORD.endswith(rest.group(1).lower()):
                    ends.add(len(WORD) - len(rest.group(1)))
                elif _WHOLE.match(start):
                    return True
    return len(WORD) in begins or bool(begins & ends)
