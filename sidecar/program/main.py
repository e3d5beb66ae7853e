"""Run one request and print one answer, framed so that the output of a login shell cannot be mistaken for it.

memory-sidecar <nonce> begin
{"status": …}
<base64 of the bundle, when it is small enough>
memory-sidecar <nonce> end <sha256 of the lines between>
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import sys
import zlib
from typing import Any, Callable, Dict, List, Sequence, Union

from sidecar.format.protocol import (
    NEED_RULES,
    Answer,
    ExportAnswer,
    ExportQuestion,
    IncomingPart,
    Link,
    LookQuestion,
    OtherProtocol,
    OutgoingPart,
    ProgramError,
    Request,
    RestoreAnswer,
    RestoreQuestion,
    Rules,
    SendQuestion,
    TidyQuestion,
    decode,
    decode_request,
    decode_rules,
    encode,
)
from sidecar.format.refusal import Refusal
from sidecar.program import kept_files, leftovers, places
from sidecar.program.scratch import Scratch

LINKS = "MEMORY_SIDECAR_LINKS"
MOST_ANSWER = 64 << 20
RUNS = {"export": "An export of %s", "restore": "A restore of %s", "tidy": "A clean-up of %s"}


class RulesMissing(Exception):
    """The rules of a request are neither in the sandbox nor in what was sent."""


def main(nonce: str, request: bytes, rules: bytes, package: bytes) -> int:
    """Run a request and print the answer. Errors are answers too; the exit code is 0.

    ``rules`` and ``package``, which this program is in, are empty unless the sidecar sent them.
    """
    links = os.environ.pop(LINKS, "")  # removed before any child process could inherit it
    try:
        asked = decode_request(request)
    except OtherProtocol as other:
        error = _build_error(Refusal("other-protocol", other.words))
        _print(nonce, Answer("error", other.memory, other.snapshot, error=error), b"")
        return 0
    home = os.path.realpath(os.environ.get("HOME") or os.path.expanduser("~"))
    run = _Run(asked, rules, package, home)
    answer = run.answer(links)
    answer.home = home
    answer.user = _read_user()
    answer.python = "%d.%d" % sys.version_info[:2]
    answer.left = run.left
    _print(nonce, answer, run.inline)
    for end in run.endings:
        end()
    return 0


def _build_error(refusal: Refusal) -> ProgramError:
    return ProgramError(refusal.code, refusal.message, refusal.retryable)


def _read_user() -> str:
    """Return the name of the user this runs as, or the number if it has no name."""
    try:
        import pwd

        return pwd.getpwuid(os.geteuid()).pw_name
    except (ImportError, KeyError):
        return str(os.geteuid())


class _Run:
    """One request, and what came of it besides the answer."""

    def __init__(self, request: Request, rules: bytes, package: bytes, home: str) -> None:
        self._question = request.question
        self._request = request
        self._rules = rules if hashlib.sha256(rules).hexdigest() == request.rules else b""
        self._package = package
        self._home = home
        self.inline = b""
        """The bytes of the bundle, if it is small enough to be printed."""
        self.left: List[str] = []
        """Uploads that could not be removed."""
        self.endings: List[Callable[[], None]] = []
        """What is done last, when the answer is on its way."""

    def answer(self, links: str) -> Answer:
        """Carry out the request. Whatever goes wrong becomes an answer."""
        question = self._question
        try:
            return self._run(links)
        except RulesMissing:
            return Answer(NEED_RULES, question.memory, question.snapshot)
        except Refusal as refusal:
            error = _build_error(refusal)
        except OSError as problem:
            full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
            error = _build_error(Refusal("disk-full" if full else "os-error", "The sandbox says: %s." % problem))
        finally:
            self._remove([self._request.path] if self._request.path else [])
        return Answer("error", question.memory, question.snapshot, error=error)

    def _run(self, links: str) -> Answer:
        question = self._question
        if isinstance(question, SendQuestion):
            from sidecar.program.links import send

            _add_links(question.parts, links)
            return send(question)
        if isinstance(question, LookQuestion):
            from sidecar.program.inspection import look

            return look(question, self._find_rules(), self._home, self._request.contained)
        if isinstance(question, RestoreQuestion) and question.links is not None:
            _add_links(question.links, links)
        return self._work(question)

    def _find_rules(self) -> Rules:
        """Return the rules: those that were sent, or those that the sandbox keeps. Raise RulesMissing."""
        rules = self._rules or kept_files.find(kept_files.RULES, self._request.rules, self._home)
        if not rules:
            raise RulesMissing
        return decode_rules(rules)

    def _work(self, question: Union[ExportQuestion, RestoreQuestion, TidyQuestion]) -> Answer:
        """Carry out a request that writes to the sidecar's folder. Its uploads are removed in the end."""
        rules = Rules([]) if isinstance(question, TidyQuestion) else self._find_rules()
        places.close_folders()
        kept, uploads = False, [] if isinstance(question, ExportQuestion) else question.uploads
        in_use = [one for one in map(leftovers.lock_upload, uploads) if one is not None]  # locked until this run ends
        about = RUNS[question.do] % question.memory
        scratch = Scratch(
            self._home, question.key, question.turn_wait, question.snapshot, self._request.contained, about
        )
        try:
            undone = _undo_restores(scratch)
            if isinstance(question, TidyQuestion):
                return _read_last_answer(scratch, question)
            if isinstance(question, ExportQuestion):
                exported = _export(question, rules, scratch, self._home, self.endings)
                kept = self._take_bundle(exported, question.inline_bytes)
                answer: Answer = exported
            else:
                answer = _restore(question, rules, scratch, self._home)
                if answer.status == "unsaved":
                    leftovers.keep_uploads(uploads)  # they are needed again once the memory was saved
                    uploads = []
            if undone:
                scratch.warnings.append("A restore that was cut short earlier has been undone.")
            answer.warnings += scratch.warnings + self._keep_files(scratch)
            return answer
        finally:
            self._keep_files(scratch)
            scratch.leave(keep=kept)
            if kept:
                from sidecar.program.reaper import reap

                reap(scratch.work, os.path.join(scratch.work, "bundle"))
            # The work is done whether or not the uploads can be removed: in /tmp only a file's owner can remove it.
            # What could not be removed is reported as ``left``.
            self._remove(uploads)
            for one in in_use:
                os.close(one)

    def _keep_files(self, scratch: Scratch) -> List[str]:
        """Keep in the sandbox what had to be sent, once. Return warnings.

        At the end of a run, whatever came of it: the work needs the room first.
        """
        told = []
        if self._package:
            told += kept_files.keep(kept_files.PROGRAM, self._package, scratch)
        if self._rules:
            told += kept_files.keep(kept_files.RULES, self._rules, scratch)
        self._package = self._rules = b""
        return told

    def _take_bundle(self, answer: ExportAnswer, most: int) -> bool:
        """Read a small bundle, to be printed. Return whether there is one that has to be fetched."""
        bundle = answer.bundle
        if bundle is None or bundle.bytes > most:
            return bundle is not None
        with open(bundle.path, "rb") as file:
            bundle.inline = True
            self.inline = file.read()
        return False

    def _remove(self, uploads: Sequence[str]) -> None:
        self.left += [path for path in uploads if not leftovers.remove(path)]


def _add_links(needed: Sequence[Union[IncomingPart, OutgoingPart]], text: str) -> None:
    """Add the presigned links to the parts of a question. They come in the environment, which other users cannot read."""
    try:
        links = json.loads(zlib.decompress(base64.b64decode(text))) if text else []
    except (ValueError, zlib.error):
        links = []
    if len(links) != len(needed):
        raise Refusal("no-direct", "The links did not arrive.")
    for part, link in zip(needed, links):
        part.link = Link(link["url"], link["headers"])


def _undo_restores(scratch: Scratch) -> bool:
    """Undo restores of any memory that were cut short, because memories can share folders. Return whether there was one."""
    found = False
    for journal in scratch.iterate_journals():
        from sidecar.program.restore.swap import settle

        found = bool(settle(journal, scratch.contained)) or found
    return found


def _export(
    question: ExportQuestion, rules: Rules, scratch: Scratch, home: str, endings: List[Callable[[], None]]
) -> ExportAnswer:
    """Export; start again if it turns out to be over a limit, if the base cannot be used, or if a copy was misread."""
    from sidecar.program.capture.builder import CopyMisread
    from sidecar.program.capture.export import BaseUnusable, Export
    from sidecar.program.limits.fit import ExportLimits, OverLimit

    fit, unusable, follows = ExportLimits(question.limits), list(question.unusable), True
    while True:
        run = Export(question, rules, scratch, home, fit, unusable, follows)
        try:
            answer = run.run()
            endings.append(run.taking.end)  # giving the disk back what copies took would hold up the answer
            return answer
        except OverLimit:
            run.taking.bundle.abandon()
            fit.start_round()
        except BaseUnusable:
            run.taking.bundle.abandon()
            unusable += run.lineage[:1]
        except CopyMisread:
            run.taking.bundle.abandon()
            follows = False


def _restore(question: RestoreQuestion, rules: Rules, scratch: Scratch, home: str) -> RestoreAnswer:
    """Restore, and write the answer down in case it is lost on the way."""
    from sidecar.program import brief, ready
    from sidecar.program.restore.restore import Restore

    ready.retract(scratch)
    run = Restore(question, rules, scratch, home)
    answer = run.run()
    if answer.status in ("complete", "kept"):
        brief.refresh(scratch, question, answer, run.roots, rules.layouts, home)
        answer.warnings += ready.announce(scratch, question, answer)
    if answer.status != "unsaved":
        with contextlib.suppress(OSError):  # a full disk: it is only needed if this answer is lost
            places.write_file(_locate_answer(scratch), encode([question.operation, answer]))
    return answer


def _locate_answer(scratch: Scratch) -> str:
    return os.path.join(scratch.memory, "answer")


def _read_last_answer(scratch: Scratch, question: TidyQuestion) -> RestoreAnswer:
    """Return the answer of an earlier restore whose answer was lost on the way, else that all is tidy."""
    tidy = RestoreAnswer("tidy", question.memory, question.snapshot)
    try:
        operation, value = json.loads(places.read_file(_locate_answer(scratch), MOST_ANSWER))
        about: Dict[str, Any] = dict(value, memory=question.memory, snapshot=question.snapshot)
        answer = decode(RestoreAnswer, about)
    except (OSError, ValueError, RecursionError, TypeError, LookupError, AttributeError):
        return tidy  # there is none, or the agent has written something else there
    return answer if operation == question.operation else tidy


def _print(nonce: str, answer: Answer, inline: bytes) -> None:
    """Print the framed answer, with a checksum over its lines."""
    body = encode(answer) + b"\n"
    if inline:
        body += base64.b64encode(inline) + b"\n"
    mark = ("memory-sidecar %s " % nonce).encode()
    end = hashlib.sha256(body).hexdigest().encode()
    out = sys.stdout.buffer
    out.write(b"\n" + mark + b"begin\n" + body + mark + b"end " + end + b"\n")
    out.flush()
