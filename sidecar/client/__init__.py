"""A client of the sidecar's HTTP API: restore before a conversation, export after it, from Python.

    from sidecar.client import Client

    with Client("http://127.0.0.1:8077", token="…") as client:
        with client.conversation("conductor", sandbox="e2b:i3x9k2") as memory:
            ...

``AsyncClient`` is the same with ``await``.
"""

from __future__ import annotations

from sidecar.client.asynchronous import AsyncClient, AsyncConversation
from sidecar.client.problems import (
    NotRestored,
    NotSaved,
    ServiceUnreachable,
    SidecarProblem,
    UnexpectedAnswer,
)
from sidecar.client.retries import Retries
from sidecar.client.synchronous import Client, Conversation
from sidecar.errors import SidecarError
from sidecar.models.answers import (
    Acceptance,
    Attached,
    Attachment,
    Change,
    Counts,
    Declined,
    Deleted,
    Difference,
    Entry,
    Event,
    Fate,
    Forgotten,
    Forked,
    Found,
    Head,
    Hit,
    Memory,
    Operation,
    Overview,
    Pinned,
    Restores,
    SandboxRestore,
    SandboxStanding,
    Size,
    Snapshot,
    SnapshotContents,
)
from sidecar.models.records import (
    Blame,
    BlamedRecord,
    Brief,
    BriefItem,
    Comparison,
    FileChange,
    HistoryEntry,
    Origin,
    RecordChange,
    RecordRow,
    Records,
    SkippedItem,
)
from sidecar.receipts import ExportOutcome, ExportReceipt, RestoreBrief, RestoreOutcome, RestoreReceipt

__all__ = [
    "Acceptance",
    "AsyncClient",
    "AsyncConversation",
    "Attached",
    "Attachment",
    "Blame",
    "BlamedRecord",
    "Brief",
    "BriefItem",
    "Change",
    "Client",
    "Comparison",
    "Conversation",
    "Counts",
    "Declined",
    "Deleted",
    "Difference",
    "Entry",
    "Event",
    "ExportOutcome",
    "ExportReceipt",
    "Fate",
    "FileChange",
    "Forgotten",
    "Forked",
    "Found",
    "Head",
    "HistoryEntry",
    "Hit",
    "Memory",
    "NotRestored",
    "NotSaved",
    "Operation",
    "Origin",
    "Overview",
    "Pinned",
    "RecordChange",
    "RecordRow",
    "Records",
    "RestoreBrief",
    "RestoreOutcome",
    "RestoreReceipt",
    "Restores",
    "Retries",
    "SandboxRestore",
    "SandboxStanding",
    "ServiceUnreachable",
    "SidecarError",
    "SidecarProblem",
    "Size",
    "SkippedItem",
    "Snapshot",
    "SnapshotContents",
    "UnexpectedAnswer",
]
