"""Send requests to the in-sandbox program, and parse its answers as untrusted input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from sidecar.engine.core import CountedSandbox
from sidecar.engine.sandbox import delivery
from sidecar.engine.sandbox.refusals import REFUSALS
from sidecar.errors import BadAnswer, LimitExceeded, MemoryMismatch, ProgramFailed, SidecarError
from sidecar.format.roots import get_root, get_stem
from sidecar.policy.limits import CODES
from sidecar.program import notes as inside
from sidecar.program.capture.export import MOST_DATABASES
from sidecar.program.limits.trim import MOST_REPORTED
from sidecar.program.notes import LONGEST_LINEAGE, MOST_ROOTS
from sidecar.program.privacy.credentials import redact_name
from sidecar.program.privacy.scrub import MOST_FINDINGS, MOST_PATHS
from sidecar.program.restore.holdings import MOST_MEMORIES, MOST_PROJECTS, MOST_SHOWN
from sidecar.receipts import DatabaseReport, Drop, Finding, SetAside, Skip, Withheld

ANSWER_ALLOWANCE = 8 << 20
"""The longest answer accepted: more than all lists of an answer together. The longest list is that of dropped files."""
LONGEST_PATH = 8192
LONGEST_USER = 256
Count = Annotated[int, msgspec.Meta(ge=0)]

HINTS = {
    "database-busy": "Something writes to this database without a pause; stop it or try again. The head did not move.",
    "disk-full": "Free some space in the sandbox; a copy of its databases must fit. The head did not move.",
    "sandbox-busy": "Wait until the other export or restore is done, then try again.",
    "tar-failed": "Look at what it names, or put a python3 into the sandbox. The head did not move.",
    "unreadable": "Run the sandbox's commands as the user who owns the memory.",
    "worker-running": "Stop the process that has the memory open, then restore again. The memory there is as it was.",
    "plugin-older": "Update the plugin in the sandbox, or say --force. The memory there is as it was.",
    "in-the-way": "Move it away or choose another --project, then restore again. The memory there is as it was.",
    "root-outside": "Put it into the sandbox's home, name the folder with --project, or allow it: [service] local_roots in the"
    " config. Nothing was changed.",
    "root-overlaps": "Look who made it lead there: it must not. Nothing was changed.",
    "memory-changed": "Something writes to the memory; stop it or try again. The memory there is as it was.",
    "set-aside-full": "Move it away or say --discard, then restore again. The memory there is as it was.",
    "journal-damaged": "Remove ~/.cache/memory-sidecar in that sandbox, once nothing runs there. Nothing was changed.",
    "unknown-layout": "Use the config file with which this memory was exported.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramError:
    """An error that the program reported."""

    code: str
    message: str
    retryable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The sandbox's claim about its bundle: a pack and its index in one file, or inline in the output."""

    path: str
    bytes: Count
    sha256: str
    inline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRoot:
    """A root that the program found, with its path."""

    name: str
    layout: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDatabase:
    """A database that the program copied or checked."""

    path: str
    method: str
    check: str
    schema: int = 0

    def report(self) -> DatabaseReport:
        return DatabaseReport(path=redact_name(self.path)[0], method=self.method, check=self.check)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSetAside:
    """Where the program has set files aside."""

    path: Annotated[str, msgspec.Meta(max_length=LONGEST_PATH)]
    files: Count
    bytes: Count

    def report(self) -> SetAside:
        return SetAside(path=redact_name(self.path)[0], files=self.files, bytes=self.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsavedMemory:
    """A memory in a sandbox of which a restore would replace files that no snapshot has
    (``sidecar.program.restore.holdings``)."""

    memory: str
    """Empty if the sandbox has it from a version that recorded no ids."""
    key: str
    sandbox: str = ""
    """The sandbox's reference when its notes were last written. A copy of a sandbox has a different one."""
    lineage: Annotated[list[str], msgspec.Meta(max_length=LONGEST_LINEAGE)] = field(default_factory=list)
    """The snapshots it was restored from and exported to, newest first."""
    unchanged: str = ""
    """Nothing changed since this snapshot, if the store has it; the sandbox cannot know that."""
    files: Count = 0
    paths: Annotated[list[str], msgspec.Meta(max_length=MOST_SHOWN)] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)
    projects: Annotated[list[str], msgspec.Meta(max_length=MOST_PROJECTS)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAnswer:
    """The fields that the answers of all verbs have, and those of the answer to a restore."""

    statuses: ClassVar[frozenset[str]] = frozenset(
        {"complete", "kept", "unsaved", "clear", "no-python", "tidy", "error"}
    )

    status: str
    memory: str
    snapshot: str
    home: Annotated[str, msgspec.Meta(max_length=LONGEST_PATH)] = ""
    user: Annotated[str, msgspec.Meta(max_length=LONGEST_USER)] = ""
    python: str = ""
    files: Count = 0
    bytes: Count = 0
    roots: list[FoundRoot] = field(default_factory=list)
    databases: list[FoundDatabase] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    skipped_more: Count = 0
    warnings: list[str] = field(default_factory=list)
    error: ProgramError | None = None
    holds: str = ""
    """The snapshot that the sandbox has and keeps."""
    unsaved: Annotated[list[UnsavedMemory], msgspec.Meta(max_length=MOST_MEMORIES)] = field(default_factory=list)
    set_aside: FoundSetAside | None = None
    withheld: Annotated[list[Withheld], msgspec.Meta(max_length=MOST_ROOTS)] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxNotes:
    """The notes that a sandbox had about a memory (``sidecar.program.notes``)."""

    memory: str
    store: str = ""
    sandbox: str = ""
    machine: str = ""
    roots: dict[str, str] = field(default_factory=dict)
    reader: bool = False
    conversation: str = ""
    current: bool = True
    withheld: tuple[str, ...] = ()

    def checked(self) -> inside.Notes | None:
        """Return the notes in the program's own type; ``None`` if they are not valid."""
        return inside.parse_value(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportAnswer(ProgramAnswer):
    """The answer to an export."""

    statuses: ClassVar[frozenset[str]] = frozenset({"changed", "unchanged", "refused", "tarball", "error"})

    projects: list[str] = field(default_factory=list)
    keyed: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    base: str = ""
    lineage: list[str] = field(default_factory=list)
    kind: str = ""
    codec: str = ""
    pack_bytes: Count = 0
    pack_sha256: str = ""
    index_sha256: str = ""
    bundle: Bundle | None = None
    dropped: Annotated[list[Drop], msgspec.Meta(max_length=MOST_REPORTED)] = field(default_factory=list)
    dropped_more: Count = 0
    dropped_files: Count = 0
    dropped_bytes: Count = 0
    policy: str = ""
    findings: Annotated[list[Finding], msgspec.Meta(max_length=MOST_FINDINGS)] = field(default_factory=list)
    findings_more: Count = 0
    found: dict[str, Count] = field(default_factory=dict)
    taken: Annotated[dict[str, tuple[Count, Count]], msgspec.Meta(max_length=MOST_PATHS)] = field(default_factory=dict)
    taken_more: tuple[Count, Count] = (0, 0)
    notes: SandboxNotes | None = None
    """The sandbox's notes about this memory before the export."""
    others: Annotated[list[SandboxNotes], msgspec.Meta(max_length=inside.MOST_TOLD)] = field(default_factory=list)
    """Its notes about other memories that are in the same folders."""
    folders: dict[str, str] = field(default_factory=dict)
    """The path of each root in the sandbox."""
    noted: Annotated[list[str], msgspec.Meta(max_length=50)] = field(default_factory=list)
    """Without Python: the raw contents of all notes in the sandbox, about this memory and others."""
    reader: bool = False
    """The memory was restored there read-only."""
    not_taken: Annotated[dict[str, Count], msgspec.Meta(max_length=MOST_ROOTS)] = field(default_factory=dict)
    """By root: how many files in it are not part of its layout."""
    databases_not_taken: Annotated[list[str], msgspec.Meta(max_length=MOST_DATABASES)] = field(default_factory=list)

    @property
    def trimmed(self) -> set[str]:
        """The roots that lost files to a size limit."""
        return {get_root(row.path) for row in self.dropped}


A = TypeVar("A", bound=ProgramAnswer)


async def ask(
    sandbox: CountedSandbox,
    request: dict[str, Any],
    kind: type[A],
    *,
    timeout: float,
    fallback: str = "",
    shell: Callable[[], str] | None = None,
) -> tuple[A, bytes]:
    """Run one request in one command. Return the answer and the inline bundle, if any.

    A sandbox without Python runs ``fallback``, which is sent along, or what ``shell`` builds, which is sent in a second
    command because it is too long to be sent to all other sandboxes too. Raise ``ProgramFailed`` or ``LimitExceeded`` if
    the program reports it, ``UntrustedSandbox`` if the answer makes no sense.
    """
    ground = sandbox.ground(request.get("projects"))
    if ground is not None:
        # On this machine a Python that can run the program always exists. A shell script is not used here, because it
        # would follow any link out of the allowed paths.
        request, fallback, shell = {**request, "contained": asdict(ground)}, "", None
    call = delivery.build_command(request, fallback=fallback, installed=ground is not None)
    # An inline bundle is base 64, which is a third longer than the bundle itself.
    limit = ANSWER_ALLOWANCE + request.get("inline_bytes", 0) * 3 // 2
    value, inline = await run_command(sandbox, call, timeout=timeout, output_limit=limit)
    if shell and value.get("status") == "no-python":
        value, inline = await run_command(
            sandbox, delivery.build_shell_command(shell()), timeout=timeout, output_limit=limit
        )
    await _remove_leftovers(sandbox, request, value)
    parsed = parse_answer(value, kind, request)
    if ground is not None and parsed.status == "no-python":
        raise ProgramFailed(f"No python3 on this machine can work in {sandbox.ref}.", code="no-python")
    return parsed, inline


async def run_command(
    sandbox: CountedSandbox, call: delivery.SandboxCommand, *, timeout: float, output_limit: int
) -> tuple[dict[str, Any], bytes]:
    """Run one command and parse the answer in its output. Raise ``ProgramFailed`` if the command failed without an
    answer."""
    finished = await sandbox.run(call.command, timeout=timeout, output_limit=output_limit, environment=call.environment)
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


async def _remove_leftovers(sandbox: CountedSandbox, request: dict[str, Any], value: dict[str, Any]) -> None:
    """Remove uploads that the program could not remove because they belong to another user: the provider's file access,
    which wrote them, can."""
    left = value.pop("left", None)
    for path in request.get("uploads", ()):
        if isinstance(left, list) and path in left:
            try:
                await sandbox.remove(path)
            except SidecarError as problem:
                if isinstance(warnings := value.setdefault("warnings", []), list):
                    warnings.append(f"{path} could not be removed from the sandbox: {problem.message}")


def parse_answer(value: dict[str, Any], kind: type[A], request: dict[str, Any]) -> A:
    """Convert an answer to its type. Raise if it is not valid, not for this request, or reports an error."""
    try:
        answer = msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as problem:
        raise BadAnswer(f"The sandbox's answer is not valid: {problem}.") from None
    if (answer.memory, answer.snapshot) != (request["memory"], request["snapshot"]):
        raise MemoryMismatch("The sandbox answered for another memory or snapshot than it was asked for.")
    if answer.error is not None:
        raise build_error(answer.error)
    if answer.status not in answer.statuses or answer.status == "error":
        raise BadAnswer(f"The sandbox's answer has a status it cannot have: {answer.status[:40]!r}.")
    if isinstance(answer, ExportAnswer):
        _check_not_taken(answer, request)
    return answer


def _check_not_taken(answer: ExportAnswer, request: dict[str, Any]) -> None:
    """Raise ``BadAnswer`` if files that were not taken are in a root that was not requested. Such a root need not have
    any file that was taken, so it may be missing from ``answer.roots``."""
    asked = {root["name"] for layout in request["layouts"] for root in layout["roots"]}
    for name in (*answer.not_taken, *map(get_root, answer.databases_not_taken)):
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
