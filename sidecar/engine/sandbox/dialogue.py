"""Send questions to the in-sandbox program, and parse its answers as untrusted input. What they say is redacted on its way
into a receipt."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from sidecar.engine.core import CountedSandbox, new_upload_path
from sidecar.engine.sandbox import delivery
from sidecar.engine.sandbox.delivery import CarriedFiles, KeptFile, Load, build_program
from sidecar.engine.sandbox.refusals import HINTS, REFUSALS
from sidecar.errors import BadAnswer, LimitExceeded, MemoryMismatch, ProgramFailed, SidecarError
from sidecar.format.protocol import (
    MOST_DATABASES,
    MOST_DROPPED,
    MOST_LOST,
    MOST_UNSAVED,
    MOST_UNSAVED_PROJECTS,
    NEED_PROGRAM,
    NEED_REQUEST,
    NEED_RULES,
    AllowedPaths,
    Answer,
    AnyQuestion,
    DroppedPath,
    ExportAnswer,
    ExportQuestion,
    FilesAside,
    FoundDatabase,
    PrivateFinding,
    ProgramError,
    RestoreAnswer,
    RestoreQuestion,
    SkippedPath,
    TidyQuestion,
    UnsavedMemory,
    WithheldRoot,
    decode_rules,
)
from sidecar.format.roots import get_root, get_stem
from sidecar.host.values import dataclass
from sidecar.policy.limits import CODES
from sidecar.program.kept_files import RULES
from sidecar.program.notes import LONGEST_LINEAGE, MOST_PATTERNS, MOST_ROOTS, MOST_TOLD
from sidecar.program.privacy.credentials import redact_name
from sidecar.program.privacy.scrub import MOST_FINDINGS, MOST_PATHS
from sidecar.receipts import DatabaseReport, Drop, Finding, SetAside, Skip, Withheld

ANSWER_ALLOWANCE = 8 << 20
"""The longest answer accepted: more than all lists of an answer together. The longest list is that of dropped files."""
LONGEST_PATH = 8192
LONGEST_USER = 256
MOST_NOTED = 50
MOST_TRIES = 3
"""How often a question is asked, each time with more of what the sandbox says that it lacks."""
BOUNDS: dict[type, dict[str, int]] = {
    Answer: {"home": LONGEST_PATH, "user": LONGEST_USER},
    ExportAnswer: {
        "dropped": MOST_DROPPED,
        "findings": MOST_FINDINGS,
        "taken": MOST_PATHS,
        "others": MOST_TOLD,
        "noted": MOST_NOTED,
        "not_taken": MOST_ROOTS,
        "part": MOST_PATTERNS,
        "databases_not_taken": MOST_DATABASES,
        "counted": MOST_DATABASES,
    },
    RestoreAnswer: {"unsaved": MOST_UNSAVED, "withheld": MOST_ROOTS},
    UnsavedMemory: {"lineage": LONGEST_LINEAGE, "paths": MOST_LOST, "projects": MOST_UNSAVED_PROJECTS},
    FilesAside: {"path": LONGEST_PATH},
}
"""How long the texts, lists and tables of an answer may be, by field. All others are bounded by the whole answer."""
ANY_NUMBER = {(FoundDatabase, "schema")}
"""Numbers that may be negative. All others are counts."""
A = TypeVar("A", bound=Answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How a question is asked."""

    timeout: float
    """The seconds that each command may take."""
    rules: KeptFile | None = None
    """The rules to answer by."""
    inline_bytes: int = 0
    """The size of the largest bundle that comes in the answer."""
    shell: Callable[[], str] | None = None
    """Builds the script for a sandbox without Python. It answers like the program."""
    carried: CarriedFiles | None = None
    """An upload in the sandbox that has the rules and the program in it."""
    at_once: bool = False
    """Send the rules and the program with the first command: the sandbox is new and has neither."""

    @property
    def output_limit(self) -> int:
        """How much a command may print. An inline bundle is base 64, a third longer than the bundle itself."""
        return ANSWER_ALLOWANCE + self.inline_bytes * 3 // 2


async def ask(sandbox: CountedSandbox, question: AnyQuestion, kind: type[A], how: Asking) -> tuple[A, bytes]:
    """Ask a question. Return the answer and the inline bundle, if any.

    It takes one command, and one more if the sandbox lacks the program or the rules, or has no Python and runs a script
    instead. Raise ``ProgramFailed`` or ``LimitExceeded`` if the program reports it, ``UntrustedSandbox`` if the answer
    makes no sense.
    """
    ground = sandbox.ground(getattr(question, "projects", None))
    # On this machine a Python that can run the program always exists. A shell script is not used here, because it would
    # follow any link out of the allowed paths.
    shell = how.shell if ground is None else None
    uploads = list(question.uploads) if isinstance(question, RestoreQuestion | TidyQuestion) else []
    value: dict[str, Any] = {"status": "no-python"}
    inline = b""
    if shell is None or not sandbox.without_python:
        allowed = AllowedPaths(list(ground.beneath), list(ground.apart)) if ground is not None else None
        value, inline = await _ask_program(sandbox, question, how, allowed, uploads)
    if value.get("status") == "no-python":
        sandbox.without_python = True
        if shell is not None:
            value, inline = await run_command(sandbox, delivery.build_shell_command(shell()), how)
    await _remove_leftovers(sandbox, uploads, value)
    parsed = parse_answer(value, kind, question, how.rules)
    if ground is not None and parsed.status == "no-python":
        raise ProgramFailed(f"No python3 on this machine can work in {sandbox.ref}.", code="no-python")
    return parsed, inline


async def _ask_program(
    sandbox: CountedSandbox, question: AnyQuestion, how: Asking, allowed: AllowedPaths | None, uploads: list[str]
) -> tuple[dict[str, Any], bytes]:
    """Run the program. Return its answer as it is, and the inline bundle. The path of an upload is added to
    ``uploads``.

    What the sandbox says that it lacks is sent with another command, in the environment. If it was sent like that
    already, the environment did not arrive, and it is sent as a file.
    """
    load = Load(question=question, rules=how.rules, allowed=allowed, carried=how.carried)
    if allowed is None or not delivery.is_installed():
        both = how.at_once
        load = replace(load, program=build_program(), with_program=both, with_rules=both)
    elif how.rules is not None:
        kept = f"~/.cache/memory-sidecar/{RULES % how.rules.sha256}"
        load = replace(load, with_rules=not sandbox.holds(kept))
    by_file = False
    for _ in range(MOST_TRIES):
        call = delivery.build_command(load)
        if by_file or delivery.is_too_long(call):
            by_file, call = True, delivery.build_command(load, new_upload_path())
            uploads.append(call.path)
        value, inline = await _run_after_upload(sandbox, call, how)
        lacks = value.get("status")
        if lacks not in (NEED_PROGRAM, NEED_RULES, NEED_REQUEST):
            return value, inline
        if by_file:
            break
        by_file = load.with_rules or load.with_program or lacks == NEED_REQUEST
        program = load.program is not None and (lacks != NEED_RULES or load.with_program)
        load = replace(load, carried=None, with_program=program, with_rules=how.rules is not None)
    raise BadAnswer("The sandbox says that it lacks what was just sent to it.")


async def _run_after_upload(
    sandbox: CountedSandbox, call: delivery.SandboxCommand, how: Asking
) -> tuple[dict[str, Any], bytes]:
    """Upload what a command needs, if it needs anything, and run it. The program removes the upload, unless it is not
    run."""
    if not call.path:
        return await run_command(sandbox, call, how)
    ran = False
    try:
        await sandbox.upload(call.path, _yield_once(call.upload))
        value, inline = await run_command(sandbox, call, how)
        ran = value.get("status") not in (NEED_PROGRAM, NEED_RULES, NEED_REQUEST)
        return value, inline
    finally:
        if not ran:
            with contextlib.suppress(SidecarError):
                await sandbox.remove(call.path)


async def _yield_once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def run_command(
    sandbox: CountedSandbox, call: delivery.SandboxCommand, how: Asking
) -> tuple[dict[str, Any], bytes]:
    """Run one command and parse the answer in its output. Raise ``ProgramFailed`` if the command failed without an
    answer."""
    finished = await sandbox.run(
        call.command, timeout=how.timeout, output_limit=how.output_limit, environment=call.environment
    )
    try:
        return delivery.parse_output(finished.output, call.nonce)
    except BadAnswer:
        if finished.exit_code == 0:
            raise
        words = finished.complaint.strip().splitlines()[-1:] or ["it said nothing"]
        # Both verbs can be done again: an export changes nothing there, and a restore that was cut short is undone first.
        failure = ProgramFailed(
            f"The program in {sandbox.ref} ended with exit code {finished.exit_code}: {redact_name(words[0])[0][:300]}",
            hint="The head did not move. Look at the sandbox's python3 and its free memory and disk.",
        )
        failure.retryable = True
        raise failure from None


async def _remove_leftovers(sandbox: CountedSandbox, uploads: list[str], value: dict[str, Any]) -> None:
    """Remove uploads that the program could not remove because they belong to another user: the provider's file access,
    which wrote them, can."""
    left = value.pop("left", None)
    for path in uploads:
        if isinstance(left, list) and path in left:
            try:
                await sandbox.remove(path)
            except SidecarError as problem:
                if isinstance(warnings := value.setdefault("warnings", []), list):
                    warnings.append(f"{path} could not be removed from the sandbox: {problem.message}")


def parse_answer(value: dict[str, Any], kind: type[A], question: AnyQuestion, rules: KeptFile | None = None) -> A:
    """Convert an answer to its type. Raise if it is not valid, not for this question, or reports an error."""
    import msgspec  # late: a command has asked before it has an answer

    try:
        answer = msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as problem:
        raise BadAnswer(f"The sandbox's answer is not valid: {problem}.") from None
    _check_bounds(answer, "$")
    if (answer.memory, answer.snapshot) != (question.memory, question.snapshot):
        raise MemoryMismatch("The sandbox answered for another memory or snapshot than it was asked for.")
    if answer.error is not None:
        raise build_error(answer.error)
    if answer.status not in answer.statuses:
        raise BadAnswer(f"The sandbox's answer has a status it cannot have: {answer.status[:40]!r}.")
    if isinstance(answer, ExportAnswer) and isinstance(question, ExportQuestion) and rules is not None:
        _check_not_taken(answer, question, rules)
    return answer


def _check_bounds(message: Any, at: str) -> None:
    """Raise ``BadAnswer`` if a field of a message, or of a message in it, is longer than it may be, or is a count below
    zero."""
    bounds = {name: most for kind in type(message).__mro__ for name, most in BOUNDS.get(kind, {}).items()}
    for each in fields(message):
        value, place = getattr(message, each.name), f"{at}.{each.name}"
        if each.name in bounds and value is not None and len(value) > bounds[each.name]:
            raise BadAnswer(f"The sandbox's answer is not valid: {place} is longer than {bounds[each.name]}.")
        if (type(message), each.name) not in ANY_NUMBER:
            for inner in _iterate_values(value):
                if is_dataclass(inner):
                    _check_bounds(inner, place)
                elif isinstance(inner, int) and inner < 0:
                    raise BadAnswer(f"The sandbox's answer is not valid: {place} is less than 0.")


def _iterate_values(value: Any) -> Iterator[Any]:
    """Yield a value, or what a list or a table contains, at any depth."""
    if isinstance(value, list | tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _iterate_values(inner)
    else:
        yield value


def _check_not_taken(answer: ExportAnswer, question: ExportQuestion, rules: KeptFile) -> None:
    """Raise ``BadAnswer`` if files that were not taken are in a root that was not requested. Such a root need not have
    any file that was taken, so it may be missing from ``answer.roots``."""
    seen = {*answer.not_taken, *map(get_root, answer.databases_not_taken)}
    layouts = decode_rules(rules.data).select(question.layouts) if seen else []
    asked = {root["name"] for layout in layouts for root in layout["roots"]}
    for name in sorted(seen):
        if get_stem(name, asked) not in asked:
            raise BadAnswer(f"The sandbox saw something in a root {name[:80]!r} that it was not asked for.")


def redact(text: str) -> str:
    """Redact credentials in a text that came from a sandbox, for a receipt. File names can contain credentials too."""
    return redact_name(text)[0]


def build_error(trouble: ProgramError) -> SidecarError:
    """Return the exception for an error that the program reported."""
    message = redact_name(trouble.message)[0]
    if trouble.code in CODES.values():
        return LimitExceeded(message, code=trouble.code)
    code = trouble.code if trouble.code in REFUSALS else ""
    failure = ProgramFailed(message, code=code, hint=HINTS.get(code, ""))
    failure.retryable = trouble.retryable
    return failure


def report_skipped(rows: Iterable[SkippedPath]) -> list[Skip]:
    return [Skip(path=redact(row.path), reason=row.reason) for row in rows]


def report_dropped(rows: Iterable[DroppedPath]) -> list[Drop]:
    return [Drop(path=redact(row.path), bytes=row.bytes, tier=row.tier, reason=row.reason) for row in rows]


def report_findings(rows: Iterable[PrivateFinding]) -> list[Finding]:
    return [
        Finding(path=redact(row.path), name=row.name, action=row.action, line=row.line, column=row.column, row=row.row)
        for row in rows
    ]


def report_databases(rows: Iterable[FoundDatabase]) -> list[DatabaseReport]:
    return [DatabaseReport(path=redact(row.path), method=row.method, check=row.check) for row in rows]


def report_withheld(rows: Iterable[WithheldRoot]) -> list[Withheld]:
    return [Withheld(name=row.name, hint=redact(row.hint), files=row.files) for row in rows]


def report_aside(row: FilesAside) -> SetAside:
    return SetAside(path=redact(row.path), files=row.files, bytes=row.bytes)
