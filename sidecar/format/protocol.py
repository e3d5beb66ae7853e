"""What the sidecar asks the program in a sandbox, and what the program answers: each message declared once.

The sidecar builds questions and reads answers, the program reads questions and builds answers. On the wire both are
JSON; a field that has its default is left out. ``docs/protocol.md`` describes the exchange.

The classes are neither frozen nor comparable. Nothing here is changed once it was sent or received.
"""

from __future__ import annotations

import json
from typing import (
    Any,
    ClassVar,
    Dict,
    FrozenSet,
    List,
    Optional,
    Tuple,
    Type,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from sidecar.format.roots import get_root
from sidecar.format.values import MISSING, dataclass, field, is_dataclass, list_fields

PROTOCOL = 2
"""The version of these declarations. A program that gets another number refuses to work."""

NEED_PROGRAM, NEED_RULES, NEED_REQUEST = "need-program", "need-rules", "need-request"
"""Statuses of an answer that asks for something to be sent again: what is not, or no longer, in the sandbox."""

MOST_DATABASES = 50
"""How many databases that no layout takes an answer names at most."""
MOST_DROPPED = 20_000
"""How many dropped files an answer names at most."""
MOST_UNSAVED, MOST_LOST, MOST_UNSAVED_PROJECTS = 200, 5, 100
"""How many unsaved memories an answer names at most, and of each how many files and projects."""

LayoutRules = Dict[str, Any]
"""A layout as plain data, without keys that are empty (``docs/layouts.md``)."""

M = TypeVar("M")


# Questions: what they have in common.


@dataclass(eq=False, repr=False)
class AllowedPaths:
    """Where the roots of a memory may be, if the sandbox is a folder on the sidecar's own machine."""

    beneath: List[str]
    """Below one of these folders. The first one is the home."""
    apart: List[str]
    """But never here. An entry that ends in ``*`` is a prefix."""


@dataclass(eq=False, repr=False)
class Identity:
    """Which memory it is, for the notes that a sandbox keeps about it."""

    memory: str
    store: str
    """The id of the store; empty if it has none."""
    sandbox: str
    """The reference of the sandbox. A copy of it has another one."""
    machine: str = ""
    """The host's name, for a folder on the sidecar's own machine."""
    conversation: str = ""
    label: str = ""
    """Of a reader: the label of what is exported from here."""
    heads: List[str] = field(default_factory=list)
    """Export: the snapshots that are or were the head of this memory."""
    allow: List[str] = field(default_factory=list)
    """Export: the mix-ups of memories that are accepted."""


@dataclass(eq=False, repr=False)
class RootHint:
    """A root of a snapshot, and where it was: below the home as ``~/…``."""

    name: str
    hint: str


APART = "link"
"""The field that is not encoded with its message."""


@dataclass(eq=False, repr=False)
class Link:
    """A presigned request to a bucket. Whoever has the URL can use it, so links travel apart from their question, which
    is encoded without them."""

    url: str
    headers: Dict[str, str]


@dataclass(eq=False, repr=False)
class LimitTable:
    """The limits on some files, together and one by one."""

    bytes: int
    file_bytes: int
    files: int
    depth: int
    trim: List[str]
    """The limits that make files be left out. The others make the export fail."""


@dataclass(eq=False, repr=False)
class Limits(LimitTable):
    """The limits of an export."""

    packed_bytes: int
    room: Optional[int] = None
    """How many bytes the pack may add to the store; ``None``: any number."""
    layouts: Dict[str, LimitTable] = field(default_factory=dict)
    """The limits of layouts that have their own."""


@dataclass(eq=False, repr=False)
class PrivacyTable:
    """What happens to private passages, and to credentials in files and in databases."""

    private: str
    credentials: str
    databases: str


@dataclass(eq=False, repr=False)
class PrivacyRules(PrivacyTable):
    """The privacy settings of an export."""

    policy: str
    """A hash of everything that decides what is taken out."""
    layouts: Dict[str, PrivacyTable] = field(default_factory=dict)
    """The settings of layouts that have their own."""
    rules: List[List[str]] = field(default_factory=list)
    """Further kinds of credentials: the name, keyword, pattern and width of each."""


@dataclass(eq=False, repr=False)
class Question:
    """What every question says. The answer repeats both."""

    do: ClassVar[str] = ""
    memory: str
    snapshot: str


# Questions, one by one.


@dataclass(eq=False, repr=False)
class ExportQuestion(Question):
    """Pack what changed."""

    do: ClassVar[str] = "export"
    key: str
    """The name of the memory's folder in the cache."""
    known: List[str]
    """Snapshots that the store has, newest first: what a sandbox has of another one is no base."""
    unusable: List[str]
    """Those of them that cannot be read."""
    identity: Identity
    layouts: List[str]
    """The names of the layouts to export, among those of the rules."""
    limits: Limits
    privacy: PrivacyRules
    inline_bytes: int
    """A bundle up to this size comes back in the answer."""
    database_wait: float
    worker_wait: float
    turn_wait: float
    projects: Optional[List[str]] = None
    """The folders of the projects; ``None``: look for them."""
    roots: List[RootHint] = field(default_factory=list)
    """The roots of the head."""
    project_hints: List[str] = field(default_factory=list)
    """The projects of the head."""
    trial: bool = False
    """What is brought is only looked at: the notes and the cache stay as they are."""


@dataclass(eq=False, repr=False)
class PackPart:
    """One pack of a bundle: its index, then the pack itself."""

    index_bytes: int
    bytes: int
    codec: str


@dataclass(eq=False, repr=False)
class UploadedBundle:
    """Where the packs of a restore are in the sandbox: a part of a file that was uploaded."""

    path: str
    start: int
    bytes: int
    sha256: str


@dataclass(eq=False, repr=False)
class IncomingPart:
    """One object of the bucket: an index or a pack, in the order of the packs."""

    bytes: int
    sha256: str
    link: Optional[Link] = None


@dataclass(eq=False, repr=False)
class Coverage:
    """The rules by which a root was exported: what was kept, and what was left out."""

    keep: List[str]
    left: List[str]


@dataclass(eq=False, repr=False)
class BriefFile:
    """What an agent should read first: the text, and where to put it below the home."""

    path: str
    text: str


@dataclass(eq=False, repr=False)
class RestoreQuestion(Question):
    """Put a snapshot in place."""

    do: ClassVar[str] = "restore"
    key: str
    operation: str
    """Names this restore, also when it is asked for again."""
    identity: Identity
    layouts: List[str]
    roots: List[RootHint]
    packs: List[PackPart]
    mode: str
    """"replace" or "seed"."""
    policy: str
    """The privacy policy under which the snapshot was made."""
    set_aside_bytes: int
    worker_wait: float
    turn_wait: float
    projects: Optional[List[str]] = None
    project_hints: List[str] = field(default_factory=list)
    withhold: bool = False
    """Leave out projects that were not named and whose folders do not exist yet."""
    covered: Dict[str, Coverage] = field(default_factory=dict)
    keyed: Dict[str, str] = field(default_factory=dict)
    versions: Dict[str, str] = field(default_factory=dict)
    force: bool = False
    discard: bool = False
    read_only: bool = False
    part: List[str] = field(default_factory=list)
    """Patterns of the paths that are restored; what else is here stays. Empty: all of the memory. Since protocol 2."""
    ask: bool = False
    """Only say whether the restore could be done."""
    stored: Dict[str, List[str]] = field(default_factory=dict)
    """The snapshots of each memory, by its key, as far as the store was read."""
    unusable: List[str] = field(default_factory=list)
    heads: List[str] = field(default_factory=list)
    """The snapshots of this memory that are or were its head."""
    keep: List[str] = field(default_factory=list)
    """A sandbox whose newest one of ``heads`` is among these is left as it is."""
    saved: bool = False
    """Everything that can be saved is saved: the rest is set aside."""
    bundle: Optional[UploadedBundle] = None
    links: Optional[List[IncomingPart]] = None
    uploads: List[str] = field(default_factory=list)
    """Files to remove from the sandbox."""
    brief: Optional[BriefFile] = None


@dataclass(eq=False, repr=False)
class TidyQuestion(Question):
    """Remove what an operation left behind, and say what came of it."""

    do: ClassVar[str] = "tidy"
    key: str
    turn_wait: float
    operation: str = ""
    """A restore whose answer was lost."""
    uploads: List[str] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class OutgoingPart:
    """A part of a bundle that goes to the bucket."""

    start: int
    bytes: int
    link: Optional[Link] = None


@dataclass(eq=False, repr=False)
class SendQuestion(Question):
    """Upload a bundle to the bucket, and remove it."""

    do: ClassVar[str] = "send"
    path: str
    parts: List[OutgoingPart]


@dataclass(eq=False, repr=False)
class LookQuestion(Question):
    """Say what is there, and change nothing."""

    do: ClassVar[str] = "look"
    layouts: List[str]
    projects: Optional[List[str]] = None


AnyQuestion = Union[ExportQuestion, RestoreQuestion, TidyQuestion, SendQuestion, LookQuestion]
QUESTIONS: Dict[str, Type[AnyQuestion]] = {
    each.do: each for each in (ExportQuestion, RestoreQuestion, TidyQuestion, SendQuestion, LookQuestion)
}


class Request:
    """A question as it travels: with the version of the protocol, the rules to answer it by, and where it may work."""

    def __init__(
        self, question: AnyQuestion, rules: str = "", contained: Optional[AllowedPaths] = None, path: str = ""
    ) -> None:
        self.question = question
        self.rules = rules
        """The hash of the rules; empty if none are needed."""
        self.contained = contained
        self.path = path
        """The file that was uploaded to bring the request, if there is one. The program removes it."""

    def encode(self) -> bytes:
        """Return the request as JSON."""
        value = {"protocol": PROTOCOL, "do": self.question.do, "question": self.question}
        return encode(dict(value, rules=self.rules, contained=self.contained, path=self.path))


def decode_request(data: bytes) -> Request:
    """Read a request. Raise OtherProtocol if it is of another version."""
    value = json.loads(data)
    if value["protocol"] != PROTOCOL:
        question = value["question"]
        raise OtherProtocol(value["protocol"], question["memory"], question["snapshot"])
    contained = value["contained"]
    question = decode(QUESTIONS[value["do"]], value["question"])
    allowed = decode(AllowedPaths, contained) if contained else None
    return Request(question, value["rules"], allowed, value["path"])


class OtherProtocol(Exception):
    """A request of another version of the protocol. What every question says is the same in all versions."""

    def __init__(self, protocol: int, memory: str, snapshot: str) -> None:
        super().__init__(protocol)
        self.memory = memory
        self.snapshot = snapshot
        self.words = "The program knows protocol %d, and was asked by protocol %s." % (PROTOCOL, protocol)


class Rules:
    """All layouts that the sidecar knows. They stay the same for a long time, so a sandbox keeps them, by their hash."""

    def __init__(self, layouts: List[LayoutRules]) -> None:
        self.layouts = layouts

    def encode(self) -> bytes:
        """Return the rules as JSON: the same bytes for the same rules."""
        return json.dumps({"layouts": self.layouts}, sort_keys=True, separators=(",", ":")).encode()

    def select(self, names: List[str]) -> List[LayoutRules]:
        """Return the layouts of these names, in the same order."""
        by_name = {layout["name"]: layout for layout in self.layouts}
        return [by_name[name] for name in names]

    def list_others(self, names: List[str]) -> List[Dict[str, Any]]:
        """Return where the roots of all other layouts are: no project is looked for in those folders."""
        others = [layout["roots"] for layout in self.layouts if layout["name"] not in names]
        keys = ("env", "paths", "project", "file")
        return [{key: root[key] for key in keys if key in root} for roots in others for root in roots]


def decode_rules(data: bytes) -> Rules:
    """Read rules. Raise ValueError."""
    return Rules(json.loads(data)["layouts"])


# Answers: what they have in common.


@dataclass(eq=False, repr=False)
class ProgramError:
    """An error that the program reports."""

    code: str
    message: str
    retryable: bool = False


@dataclass(eq=False, repr=False)
class FoundRoot:
    """A root in the sandbox, and its path."""

    name: str
    layout: str
    hint: str


@dataclass(eq=False, repr=False)
class FoundDatabase:
    """A database that was copied or checked, and what SQLite says of it."""

    path: str
    method: str
    check: str
    schema: int = 0


@dataclass(eq=False, repr=False)
class SkippedPath:
    """A path that was left out, and why."""

    path: str
    reason: str


@dataclass(eq=False, repr=False)
class Answer:
    """What every answer says."""

    statuses: ClassVar[FrozenSet[str]] = frozenset()
    """The statuses that the answer to this question can have, besides "error"."""
    status: str
    memory: str
    snapshot: str
    home: str = ""
    user: str = ""
    python: str = ""
    warnings: List[str] = field(default_factory=list)
    left: List[str] = field(default_factory=list)
    """Uploads that could not be removed."""
    error: Optional[ProgramError] = None


# Answers, one by one.


@dataclass(eq=False, repr=False)
class Bundle:
    """A pack and its index in one file, or behind the answer."""

    path: str
    bytes: int
    sha256: str
    inline: bool = False


@dataclass(eq=False, repr=False)
class DroppedPath:
    """A path that was left out because there was more than a limit allows."""

    path: str
    bytes: int
    tier: str
    reason: str


@dataclass(eq=False, repr=False)
class PrivateFinding:
    """Something private, or a credential: where it is and what was done, never what it is."""

    path: str
    name: str
    action: str
    line: int = 0
    column: str = ""
    row: str = ""


@dataclass(eq=False, repr=False)
class SandboxNotes:
    """The notes that a sandbox had about a memory."""

    memory: str
    roots: Dict[str, str] = field(default_factory=dict)
    store: str = ""
    sandbox: str = ""
    machine: str = ""
    reader: bool = False
    conversation: str = ""
    current: bool = True
    withheld: List[str] = field(default_factory=list)
    label: str = ""


@dataclass(eq=False, repr=False)
class ExportAnswer(Answer):
    """What an export found and packed."""

    statuses: ClassVar[FrozenSet[str]] = frozenset(["changed", "unchanged", "refused", "tarball"])
    files: int = 0
    bytes: int = 0
    roots: List[FoundRoot] = field(default_factory=list)
    databases: List[FoundDatabase] = field(default_factory=list)
    skipped: List[SkippedPath] = field(default_factory=list)
    skipped_more: int = 0
    projects: List[str] = field(default_factory=list)
    keyed: Dict[str, str] = field(default_factory=dict)
    versions: Dict[str, str] = field(default_factory=dict)
    base: str = ""
    """The snapshot that the bundle builds on; empty for a full one."""
    lineage: List[str] = field(default_factory=list)
    """The known snapshots that the memory here was restored from or exported to, newest first."""
    reader: bool = False
    """The memory was restored here to be read."""
    part: List[str] = field(default_factory=list)
    """Only these paths of it were restored here, and only these are exported."""
    kind: str = ""
    codec: str = ""
    pack_bytes: int = 0
    pack_sha256: str = ""
    index_sha256: str = ""
    bundle: Optional[Bundle] = None
    dropped: List[DroppedPath] = field(default_factory=list)
    dropped_more: int = 0
    dropped_files: int = 0
    dropped_bytes: int = 0
    policy: str = ""
    """The privacy policy under which all of it was screened; empty if not all was under one."""
    findings: List[PrivateFinding] = field(default_factory=list)
    findings_more: int = 0
    found: Dict[str, int] = field(default_factory=dict)
    """How many findings there are of each action."""
    taken: Dict[str, Tuple[int, int]] = field(default_factory=dict)
    """How many private passages and credentials were taken out, by path."""
    taken_more: Tuple[int, int] = (0, 0)
    notes: Optional[SandboxNotes] = None
    """The sandbox's notes about this memory, before the export."""
    others: List[SandboxNotes] = field(default_factory=list)
    """Its notes about other memories in the same folders."""
    folders: Dict[str, str] = field(default_factory=dict)
    """The real folder of each root."""
    noted: List[str] = field(default_factory=list)
    """Without Python: the contents of all notes in the sandbox, as they are."""
    not_taken: Dict[str, int] = field(default_factory=dict)
    """By root: how many files in it are not part of its layout."""
    databases_not_taken: List[str] = field(default_factory=list)
    counted: Dict[str, Dict[str, Tuple[int, int, int]]] = field(default_factory=dict)
    """By changed database: how many records came, changed and went since the base, by kind. Only those that could be
    counted."""

    @property
    def trimmed(self) -> FrozenSet[str]:
        """The roots that lost files to a size limit."""
        return frozenset(get_root(row.path) for row in self.dropped)


@dataclass(eq=False, repr=False)
class UnsavedMemory:
    """A memory in the sandbox of which a restore would replace files that no snapshot has."""

    memory: str
    """Empty if the sandbox has it from a version that recorded no ids."""
    key: str
    sandbox: str = ""
    """The sandbox's reference when its notes were last written. A copy of a sandbox has a different one."""
    lineage: List[str] = field(default_factory=list)
    """The snapshots it was restored from and exported to, newest first."""
    unchanged: str = ""
    """Nothing changed since this snapshot, if the store has it; the sandbox cannot know that."""
    files: int = 0
    paths: List[str] = field(default_factory=list)
    layouts: List[str] = field(default_factory=list)
    projects: Optional[List[str]] = None


@dataclass(eq=False, repr=False)
class FilesAside:
    """Where files were set aside that came with the sandbox."""

    path: str
    files: int
    bytes: int


@dataclass(eq=False, repr=False)
class WithheldRoot:
    """A root of a project that was not restored, because its folder does not exist yet."""

    name: str
    hint: str
    files: int = 0


@dataclass(eq=False, repr=False)
class RestoreAnswer(Answer):
    """What a restore has done, or what has to be done before it. Also the answer to a ``TidyQuestion``."""

    statuses: ClassVar[FrozenSet[str]] = frozenset(["complete", "kept", "unsaved", "clear", "no-python", "tidy"])
    files: int = 0
    bytes: int = 0
    roots: List[FoundRoot] = field(default_factory=list)
    databases: List[FoundDatabase] = field(default_factory=list)
    skipped: List[SkippedPath] = field(default_factory=list)
    holds: str = ""
    """The snapshot that the sandbox has and keeps."""
    unsaved: List[UnsavedMemory] = field(default_factory=list)
    set_aside: Optional[FilesAside] = None
    withheld: List[WithheldRoot] = field(default_factory=list)
    brief: bool = False
    """The brief is where it was to be put."""


@dataclass(eq=False, repr=False)
class SendAnswer(Answer):
    """That a bundle was sent to the bucket."""

    statuses: ClassVar[FrozenSet[str]] = frozenset(["sent", "no-python"])


@dataclass(eq=False, repr=False)
class Amount:
    """A number of files and their bytes."""

    files: int = 0
    bytes: int = 0


@dataclass(eq=False, repr=False)
class SeenDatabase:
    """A database in the sandbox: its size, and how much of it is free pages or log."""

    path: str
    place: str
    bytes: int
    free_bytes: int = 0
    log_bytes: int = 0


@dataclass(eq=False, repr=False)
class SeenSet:
    """Files that are kept or dropped together, and their tier."""

    tier: str
    paths: int


@dataclass(eq=False, repr=False)
class SeenRoot:
    """A root as it is in the sandbox: what an export would take of it, and what not."""

    name: str
    layout: str
    folder: str
    tiers: Dict[str, Amount]
    version: str = ""
    """The version of the program whose memory it is."""
    sets: List[SeenSet] = field(default_factory=list)
    databases: List[SeenDatabase] = field(default_factory=list)
    workers: List[str] = field(default_factory=list)
    """Processes that have a database open."""
    keyed: Dict[str, str] = field(default_factory=dict)
    skipped: List[SkippedPath] = field(default_factory=list)
    skipped_more: int = 0
    reasons: Dict[str, int] = field(default_factory=dict)
    problem: str = ""
    """Why an export would be refused."""


@dataclass(eq=False, repr=False)
class LookAnswer(Answer):
    """What is in the sandbox."""

    statuses: ClassVar[FrozenSet[str]] = frozenset(["looked", "no-python"])
    projects: List[str] = field(default_factory=list)
    found: List[SeenRoot] = field(default_factory=list)
    notices: List[str] = field(default_factory=list)
    """Limits that the search for projects has reached."""


# The wire.


def encode(value: Any) -> bytes:
    """Return a message, or a value with messages in it, as JSON. Fields that have their defaults are left out."""
    return json.dumps(value, default=_list_fields, separators=(",", ":")).encode()


def _list_fields(message: Any) -> Dict[str, Any]:
    """Return the fields of a message that differ from their defaults."""
    if not is_dataclass(type(message)):
        raise TypeError("%r cannot be sent." % type(message))
    told = {}
    for name, default, factory in list_fields(type(message)):
        value = getattr(message, name)
        if name != APART and value != (default if factory is MISSING else factory()):
            told[name] = value
    return told


def decode(kind: Type[M], value: Dict[str, Any]) -> M:
    """Build a message from JSON that the sidecar sent. It restores the structure, and checks nothing."""
    hints, make = get_type_hints(kind), cast(Any, kind)
    message: M = make(**{name: _restore(hints[name], inner) for name, inner in value.items()})
    return message


def _restore(hint: Any, value: Any) -> Any:
    """Build the messages in a value of this type."""
    if value is None:
        return None
    if is_dataclass(hint):
        return decode(cast(Any, hint), value)
    inner = get_args(hint)
    if get_origin(hint) is Union:  # Optional[…]
        return _restore(inner[0], value)
    if isinstance(value, list):
        return [_restore(inner[0], each) for each in value]
    if isinstance(value, dict):
        return {name: _restore(inner[1], each) for name, each in value.items()}
    return value
