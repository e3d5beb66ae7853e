"""Ask the program in a sandbox, and take its answer for what it is: somebody else's word."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from sidecar.engine.core import CountedSandbox
from sidecar.engine.sandbox import delivery
from sidecar.errors import BadAnswer, LimitExceeded, MemoryMismatch, ProgramFailed, SidecarError
from sidecar.program import notes as inside
from sidecar.program.capture.export import MOST_DATABASES
from sidecar.program.capture.roots import split_number
from sidecar.program.limits.trim import MOST_REPORTED
from sidecar.program.lineage import LONGEST as MOST_LINEAGE
from sidecar.program.notes import MOST_ROOTS
from sidecar.program.privacy.credentials import redact_name
from sidecar.program.privacy.scrub import MOST_FINDINGS, MOST_PATHS
from sidecar.program.restore.holdings import MOST_MEMORIES, MOST_PROJECTS, MOST_SHOWN
from sidecar.receipts import DatabaseReport, Drop, Finding, SetAside, Skip, Withheld

ANSWER_ALLOWANCE = 8 << 20
"""More than all lists of an answer together: the longest is of what was dropped."""
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
    code: str
    message: str
    retryable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    path: str
    bytes: Count
    sha256: str
    inline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRoot:
    name: str
    layout: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDatabase:
    path: str
    method: str
    check: str
    schema: int = 0

    def report(self) -> DatabaseReport:
        return DatabaseReport(path=redact_name(self.path)[0], method=self.method, check=self.check)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSetAside:
    path: Annotated[str, msgspec.Meta(max_length=LONGEST_PATH)]
    files: Count
    bytes: Count

    def report(self) -> SetAside:
        return SetAside(path=redact_name(self.path)[0], files=self.files, bytes=self.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsavedMemory:
    """A memory in a sandbox of which a restore would replace something that no snapshot has
    (``sidecar.program.restore.holdings``)."""

    memory: str
    """"" where the sandbox has it from a version that noted no ids."""
    key: str
    sandbox: str = ""
    """Where it was when it was last noted. A copy of a sandbox has another reference."""
    lineage: Annotated[list[str], msgspec.Meta(max_length=MOST_LINEAGE)] = field(default_factory=list)
    """The snapshots it was restored from and exported to, newest first."""
    unchanged: str = ""
    """Nothing changed since this one, which has yet to be seen in the store."""
    files: Count = 0
    paths: Annotated[list[str], msgspec.Meta(max_length=MOST_SHOWN)] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)
    projects: Annotated[list[str], msgspec.Meta(max_length=MOST_PROJECTS)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAnswer:
    """What both verbs are told; this one, what a restore is told."""

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
    """What a sandbox had noted of a memory (``sidecar.program.notes``)."""

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
        """As the program has them; ``None`` unless they are such as it writes."""
        return inside.parse_value(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportAnswer(ProgramAnswer):
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
    """The sandbox's notes of this memory before the export."""
    others: Annotated[list[SandboxNotes], msgspec.Meta(max_length=inside.MOST_TOLD)] = field(default_factory=list)
    """Its notes of other memories that are in the same folders."""
    folders: dict[str, str] = field(default_factory=dict)
    """Where each root is there."""
    noted: Annotated[list[str], msgspec.Meta(max_length=50)] = field(default_factory=list)
    """Without Python: the contents of the notes there are, of this memory and others, as they are."""
    reader: bool = False
    """The memory was restored there only to be read."""
    not_taken: Annotated[dict[str, Count], msgspec.Meta(max_length=MOST_ROOTS)] = field(default_factory=dict)
    """By root: what was seen in it and is not part of its layout."""
    databases_not_taken: Annotated[list[str], msgspec.Meta(max_length=MOST_DATABASES)] = field(default_factory=list)

    @property
    def trimmed(self) -> set[str]:
        """The roots that a size limit took something from."""
        return {row.path.split("/")[0] for row in self.dropped}


A = TypeVar("A", bound=ProgramAnswer)


async def ask(
    sandbox: CountedSandbox,
    request: dict[str, Any],
    kind: type[A],
    *,
    timeout: float,
    inline_bytes: int = 0,
    fallback: str = "",
    shell: str = "",
) -> tuple[A, bytes]:
    """Run one request in one command. Return the answer and the bundle that came with it.

    A sandbox without Python gets the ``fallback`` along with it, or the script ``shell`` in a second command: that is too long
    to be sent to all others as well.

    Raise ``ProgramFailed`` or ``LimitExceeded`` when the program says so, ``UntrustedSandbox`` when it makes no sense.
    """
    ground = sandbox.ground(request.get("projects"))
    if ground is not None:
        # Here a Python that can run the program is always found: a shell script would follow any link.
        request, fallback, shell = {**request, "contained": asdict(ground)}, "", ""
    call = delivery.build_command(request, fallback=fallback, installed=ground is not None)
    limit = ANSWER_ALLOWANCE + inline_bytes * 3 // 2
    value, inline = await run_command(sandbox, call, timeout=timeout, output_limit=limit)
    if shell and value.get("status") == "no-python":
        value, inline = await run_command(
            sandbox, delivery.build_shell_command(shell), timeout=timeout, output_limit=limit
        )
    await _remove_leftovers(sandbox, request, value)
    parsed = parse_answer(value, kind, request)
    if ground is not None and parsed.status == "no-python":
        raise ProgramFailed(f"No python3 on this machine can work in {sandbox.ref}.", code="no-python")
    return parsed, inline


async def run_command(
    sandbox: CountedSandbox, call: delivery.SandboxCommand, *, timeout: float, output_limit: int
) -> tuple[dict[str, Any], bytes]:
    """Run one command, and find the answer in what it prints. Raise ``ProgramFailed`` when it failed without any."""
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
    """Remove uploads that the program could not, as they are another user's: whoever wrote them can."""
    left = value.pop("left", None)
    for path in request.get("uploads", ()):
        if isinstance(left, list) and path in left:
            try:
                await sandbox.remove(path)
            except SidecarError as problem:
                if isinstance(warnings := value.setdefault("warnings", []), list):
                    warnings.append(f"{path} could not be removed from the sandbox: {problem.message}")


def parse_answer(value: dict[str, Any], kind: type[A], request: dict[str, Any]) -> A:
    """An answer as a type. Raise when it is not valid, not for this request, or says that something went wrong."""
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
    """What was seen and not taken is in roots that were asked for: these need not hold anything that was."""
    asked = {root["name"] for layout in request["layouts"] for root in layout["roots"]}
    for name in (*answer.not_taken, *(path.partition("/")[0] for path in answer.databases_not_taken)):
        if name not in asked and split_number(name)[0] not in asked:
            raise BadAnswer(f"The sandbox saw something in a root {name[:80]!r} that it was not asked for.")


def build_error(trouble: ProgramError) -> SidecarError:
    message = redact_name(trouble.message)[0]
    if trouble.code.startswith("limit-"):
        return LimitExceeded(message, code=trouble.code)
    failure = ProgramFailed(message, code=trouble.code, hint=HINTS.get(trouble.code, ""))
    failure.retryable = trouble.retryable
    return failure
