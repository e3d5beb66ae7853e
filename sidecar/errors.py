"""Everything that can go wrong, on one screen.

    SidecarError
    ├── UsageError                 exit 2   what was asked for makes no sense
    │   ├── BadMemoryId · BadReference · BadConfig · UnknownLayout · UnknownReason
    │   ├── NothingToAccept        that snapshot does not stand beside the head
    │   ├── AlreadyDecided         somebody has accepted or declined that snapshot before
    │   ├── NotReviewed            that snapshot waits for a review, or was declined
    │   └── NoIndex · DriverMissing
    ├── StoreError                 exit 1
    │   ├── StoreUnreachable       (a retry can help)
    │   ├── StoreDenied · StoreMissing · StoreFull · StoreUnsafe
    │   ├── EncryptionRefused      the server does not encrypt as the store's URL asks
    │   ├── KeyRefused             the server takes no object of that name
    │   ├── SecondWriter           another sidecar writes to a store that only one may write to
    │   ├── KeyNeeded              it is sealed or signed, and the key for that was not given
    │   ├── ObjectMissing          an object the store should hold is not there
    │   └── SwapLost               compare-and-swap lost: someone else wrote first
    ├── SnapshotError              exit 1
    │   ├── MemoryNotFound · SnapshotNotFound
    │   │   └── RecordNotFound     the snapshot has no such file or record
    │   ├── SnapshotDamaged
    │   │   ├── UnknownFormat      a later version wrote it
    │   │   └── ObjectRefused      a sealed object was altered
    │   │       └── NotSigned      it is not signed by a key that is trusted
    │   └── BaseCollected          a pack that an export builds on went meanwhile (a retry can help)
    ├── SandboxError               exit 1
    │   ├── SandboxNotFound · SandboxGone · SandboxAsleep · SandboxDenied · SandboxFull · SdkMissing
    │   ├── SandboxUnwritable      its daemon may not write where we have to
    │   ├── SandboxNotAllowed      a folder of this machine that may not be a sandbox
    │   ├── SandboxUnreachable · SandboxBusy · SandboxTimeout · TransferFailed   (a retry can help)
    │   ├── ProgramFailed          the in-sandbox program said what went wrong
    │   ├── RestoreIncomplete      exit 4: it was to be restored and then attached
    │   ├── NotEnded               exit 3: a sandbox was not ended, because its memory was not saved
    │   ├── NotMoved               exit 3: a memory was not moved, because the old sandbox is not saved
    │   └── NotSavedFirst          what a restore would replace could not be saved
    ├── UntrustedSandbox           exit 1   what came out of a sandbox or tarball was refused
    │   ├── BadAnswer · OutputTooLarge · MemoryMismatch
    │   ├── UnsafePath · UnsafeLink · UnsafeMember
    │   ├── SizeMismatch · DigestMismatch · PackBomb
    │   └── UnpackTimeout          it took longer to read than it may
    ├── SearchError                exit 1   the database that is searched; never in the way of an export
    │   ├── SearchUnreachable · SearchBusy · IndexReset   (a retry can help)
    │   └── SearchDenied · SearchUnfit
    ├── AccessDenied               exit 1   the token may not do that
    │   ├── TokenExpired
    │   └── MemoryNotWatched       a sandbox names a memory that it may not have
    ├── RateLimited                exit 1   the token calls more often than it may (a retry can help)
    ├── LimitExceeded              exit 3   more than the limits allow; the head did not move
    │   └── QuotaBytes · QuotaMemories      more than the token may have
    └── Interrupted                exit 130 told to end before it was done (a retry can help)

Each class carries a stable ``code`` for programs, ``retryable`` for callers and a hint (what to do) for people, and each
instance a message (what happened). The first line of each docstring is what docs/reference/errors.md says of the code. Other
modules have subclasses of their own; a subclass that declares no code is told as its parent.
"""

from __future__ import annotations

from typing import ClassVar


class SidecarError(Exception):
    """Something unexpected went wrong.

    The root: nothing the product raises on purpose is outside this tree.
    """

    code: str = "failed"
    retryable: bool = False
    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = "This is a fault of the sidecar itself: its log has the cause. Please report it."

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint
        if code:
            self.code = code

    def __str__(self) -> str:
        """The message and the hint, for a log or a traceback."""
        return f"{self.message} {self.hint}".rstrip()

    def as_dict(self) -> dict[str, object]:
        return {"code": self.code, "message": self.message, "hint": self.hint, "retryable": self.retryable}


class UsageError(SidecarError):
    """What was asked for makes no sense, or cannot be done this way."""

    code = "usage"
    exit_code = 2
    default_hint = "`memory-sidecar COMMAND --help` shows what a command takes; over HTTP, /openapi.json does."


class BadMemoryId(UsageError):
    """The id of a memory is not one."""

    code = "bad-memory-id"
    default_hint = "Use 1 to 200 characters; '/' may separate parts, but no part may be empty, '.' or '..'."


class BadReference(UsageError):
    """A sandbox, a store, a snapshot or an option is not written as it should be."""

    code = "bad-reference"
    default_hint = "`memory-sidecar COMMAND --help` shows how it is written."


class BadConfig(UsageError):
    """The config file, or a variable that stands for an option, has a wrong setting.

    ``at`` is where in the file the wrong setting is: its section and key.
    """

    code = "bad-config"
    default_hint = "`memory-sidecar config options` lists every option and its default."

    def __init__(self, message: str, *, hint: str = "", at: tuple[str | int, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.at = at


class UnknownLayout(UsageError):
    """There is no layout of that name."""

    code = "unknown-layout"
    default_hint = "`memory-sidecar layouts` lists those there are."


class UnknownReason(UsageError):
    """There is no guard of that name to allow."""

    code = "unknown-reason"
    default_hint = "The reference of error codes lists the guards."


class NothingToAccept(UsageError):
    """The snapshot is not one that a guard rejected or that diverged, so there is nothing to accept."""

    code = "nothing-to-accept"
    default_hint = "`memory-sidecar log MEMORY` shows which snapshots were rejected, or have diverged."


class AlreadyDecided(UsageError):
    """Somebody has accepted or declined the snapshot before."""

    code = "already-decided"
    default_hint = (
        "A decision stays. What was declined can be downloaded and imported again, to be looked at once more; what was"
        " accepted can be rolled back."
    )


class NotReviewed(UsageError):
    """The snapshot waits for a review, or was declined: it cannot be rolled back to or forked."""

    code = "not-reviewed"
    default_hint = "`memory-sidecar accept MEMORY SNAPSHOT` makes one that waits the head."


class NoIndex(UsageError):
    """There is no index to search."""

    code = "no-index"
    default_hint = 'Set [search] embedded = "plain", or MEMORY_SIDECAR_POSTGRES to a URL; see docs/search.md.'


class DriverMissing(UsageError):
    """The package that talks to Postgres is not installed."""

    code = "driver-missing"
    default_hint = "pip install 'memory-sidecar[postgres]'"


class StoreError(SidecarError):
    """The store failed in a way that has no code of its own."""

    code = "store-failed"
    default_hint = "`memory-sidecar doctor` checks the store."


class StoreUnreachable(StoreError):
    """The store did not answer."""

    code = "store-unreachable"
    retryable = True
    default_hint = "Check the endpoint and the network, then run the same command again; that is always safe."


class StoreDenied(StoreError):
    """The store refused the credentials, or what they may do."""

    code = "store-denied"
    default_hint = "Check the credentials and that they may read, write, list and delete under this prefix."


class StoreMissing(StoreError):
    """The bucket, the folder or the mount of the store is not there."""

    code = "store-missing"
    default_hint = "Create it, or correct the store's URL; the sidecar never makes a bucket or a mount."


class StoreFull(StoreError):
    """The store has no room left."""

    code = "store-full"
    default_hint = "Free some space or enlarge the disk, then run the same command again; the head did not move."


class StoreUnsafe(StoreError):
    """The S3 server ignores conditional writes, so two writers could overwrite each other."""

    code = "store-no-conditional-writes"
    default_hint = "Use another server, or add single-writer=true to the store's URL and run one sidecar at a time."


class EncryptionRefused(StoreError):
    """The server does not encrypt as ``sse=`` in the store's URL asks."""

    code = "store-encryption-refused"
    default_hint = "Leave sse= out of the store's URL, or set up a key service on the server."


class KeyRefused(StoreError):
    """The server does not accept an object of that name."""

    code = "store-key-refused"
    default_hint = "Use letters, digits, '-', '_' and '.' in the prefix of the store's URL."


class SecondWriter(StoreError):
    """Another sidecar is writing to a store that only one may write to."""

    code = "store-second-writer"
    default_hint = "Let one sidecar write to this store at a time: stop the other, or have it done by that one."


class KeyNeeded(StoreError):
    """The store is encrypted or signed, and the key for that was not given."""

    code = "key-needed"
    default_hint = (
        "Set [encryption] identity_files (MEMORY_SIDECAR_IDENTITY_FILE) or passphrase_file (MEMORY_SIDECAR_PASSPHRASE_FILE)"
        " to the key this store was sealed for. Nothing was changed."
    )


class ObjectMissing(StoreError):
    """An object that the store should hold is not there."""

    code = "object-missing"
    default_hint = "`memory-sidecar verify` shows which snapshots are whole."


class SwapLost(StoreError):
    """Another writer replaced the same object first: a compare-and-swap was lost."""

    code = "head-moved"
    retryable = True
    default_hint = "Run the same command again; it starts from what is in the store now."


class SnapshotError(SidecarError):
    """A snapshot, or something kept for a memory, cannot be used."""

    code = "snapshot-failed"
    default_hint = "`memory-sidecar verify MEMORY` shows which snapshots are whole."


class MemoryNotFound(SnapshotError):
    """The store has no memory of that id."""

    code = "memory-not-found"
    default_hint = "`memory-sidecar list` shows the memories of this store."


class SnapshotNotFound(SnapshotError):
    """The memory has no such snapshot."""

    code = "snapshot-not-found"
    default_hint = "`memory-sidecar log MEMORY` shows its snapshots."


class RecordNotFound(SnapshotNotFound):
    """The snapshot has no such file or record."""

    code = "record-not-found"
    default_hint = "`memory-sidecar show MEMORY` lists files, `memory-sidecar records MEMORY` records."


class SnapshotDamaged(SnapshotError):
    """Part of a snapshot is missing, or differs from what was written."""

    code = "snapshot-damaged"
    default_hint = "`memory-sidecar verify MEMORY` shows which snapshots are whole."


class UnknownFormat(SnapshotDamaged):
    code = "unknown-format"
    default_hint = "Update the sidecar."


class ObjectRefused(SnapshotDamaged):
    """An encrypted object was altered, or put in the place of another.

    ``version`` is what a swap that replaces the object must still find.
    """

    code = "object-refused"
    default_hint = "`memory-sidecar verify` shows what else differs; put the object back from a copy of the store."

    def __init__(self, message: str, *, version: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.version = version


class NotSigned(ObjectRefused):
    """An object is not signed by a key that is trusted."""

    code = "not-signed"
    default_hint = (
        "It was written without the signing key, or before signing was turned on: then `memory-sidecar rekey"
        " --trust-unsigned` signs what is there."
    )


class BaseCollected(SnapshotError):
    """A pack that an export builds on was removed from the store meanwhile."""

    code = "base-collected"
    retryable = True
    default_hint = "Run the same command again: it starts from what is in the store now. The head did not move."


class SandboxError(SidecarError):
    """The sandbox or its provider failed in a way that has no code of its own."""

    code = "sandbox-failed"
    default_hint = "`memory-sidecar doctor --sandbox REF` shows whether it can be worked with."


class SandboxNotFound(SandboxError):
    """The provider has no sandbox of that id, or the folder is not there."""

    code = "sandbox-not-found"
    default_hint = "Check the id, and that the provider's key belongs to the same account."


class SandboxGone(SandboxError):
    """The sandbox has ended."""

    code = "sandbox-gone"
    default_hint = (
        "What was exported before is safe: `memory-sidecar log MEMORY` shows it; restore it into a new sandbox."
    )


class SandboxAsleep(SandboxError):
    """The sandbox is paused or stopped."""

    code = "sandbox-asleep"
    default_hint = "Add --wake to start it again for this, or start it yourself."


class SandboxDenied(SandboxError):
    """The provider refused the key, or what it may do."""

    code = "sandbox-denied"
    default_hint = "Check the provider's key in the environment, such as E2B_API_KEY or DAYTONA_API_KEY."


class SandboxNotAllowed(SandboxError):
    """A folder of this machine may not be a sandbox here."""

    code = "sandbox-not-allowed"
    default_hint = "Add it to [service] local_roots in the config."


class SandboxFull(SandboxError):
    """The disk of the sandbox is full."""

    code = "disk-full"
    default_hint = "Free some space in the sandbox, then try again; the memory there is as it was."


class SandboxUnwritable(SandboxError):
    """The sandbox does not let its user write where the sidecar has to."""

    code = "sandbox-unwritable"
    default_hint = (
        "Make /tmp in the sandbox a folder that this user may write to, or name another user with --user, then try again;"
        " the memory there is as it was."
    )


class SdkMissing(SandboxError):
    """The SDK of the provider is not installed."""

    code = "sdk-missing"
    default_hint = "pip install 'memory-sidecar[e2b]' or 'memory-sidecar[daytona]'"


class SandboxUnreachable(SandboxError):
    """The sandbox or its provider did not answer."""

    code = "sandbox-unreachable"
    retryable = True
    default_hint = "Check the network and the provider's status, then run the same command again; that is always safe."


class SandboxBusy(SandboxError):
    """The sandbox, or its provider, is busy with something else."""

    code = "sandbox-busy"
    retryable = True
    default_hint = "Wait a little, then run the same command again; that is always safe."


class SandboxTimeout(SandboxError):
    """A command in the sandbox took too long."""

    code = "sandbox-timeout"
    retryable = True
    default_hint = (
        "Raise [timing] command in the config, or look at what the sandbox is busy with; the head did not move."
    )


class TransferFailed(SandboxError):
    """A file did not arrive at the sandbox, or did not come from it."""

    code = "transfer-failed"
    retryable = True
    default_hint = "Run the same command again; that is always safe."


class ProgramFailed(SandboxError):
    """The program inside the sandbox could not go on; its own code says why."""

    code = "sandbox-program-failed"
    default_hint = "Look at what the message names in the sandbox, then try again. The head did not move."


class RestoreIncomplete(SandboxError):
    """A sandbox was to be restored and then attached, and the restore is incomplete."""

    code = "restore-incomplete"
    exit_code = 4
    default_hint = "What the sandbox had is as it was, and it is not looked after. Restore it first, or attach without."


class NotEnded(SandboxError):
    """A sandbox was not ended, because its memory was not saved."""

    code = "not-ended"
    exit_code = 3
    default_hint = (
        "It runs on, and is looked after. Mend what is wrong and stop it again, or end it unsaved with --discard (discard,"
        " over HTTP)."
    )


class NotMoved(SandboxError):
    """A memory was not moved to another sandbox, because what the old one has is not saved, or not in the new one."""

    code = "not-moved"
    exit_code = 3
    default_hint = (
        "The old sandbox runs on, and is looked after. Mend what is wrong, or let its agent rest, and move again."
    )


class NotSavedFirst(SandboxError):
    """A restore would replace memory that is in no snapshot, and it could not be saved first."""

    code = "unsaved"
    default_hint = "Export it, or say --discard to lose it. The sandbox is as it was."


class UntrustedSandbox(SidecarError):
    """What came out of a sandbox or a tarball was refused."""

    code = "untrusted"
    default_hint = (
        "Nothing was stored and the head did not move. Look at what runs in that sandbox before trying again."
    )


class BadAnswer(UntrustedSandbox):
    """The sandbox's answer is not what the program writes."""

    code = "bad-answer"


class OutputTooLarge(UntrustedSandbox):
    """The sandbox's answer is larger than it may be."""

    code = "output-too-large"


class MemoryMismatch(UntrustedSandbox):
    """The sandbox answered for another memory than the one asked for."""

    code = "memory-mismatch"


class UnsafePath(UntrustedSandbox):
    """A path is absolute, leads out of its root, or is no path."""

    code = "unsafe-path"


class UnsafeLink(UntrustedSandbox):
    """A link leads out of its root."""

    code = "unsafe-link"


class UnsafeMember(UntrustedSandbox):
    """A tarball holds something that is neither file, folder nor link."""

    code = "unsafe-member"


class SizeMismatch(UntrustedSandbox):
    """What arrived is not as long as the sandbox said."""

    code = "size-mismatch"
    retryable = True


class DigestMismatch(UntrustedSandbox):
    """What arrived does not have the hash that the sandbox said."""

    code = "digest-mismatch"
    retryable = True


class PackBomb(UntrustedSandbox):
    """A pack or tarball unpacks to more than it may."""

    code = "pack-bomb"


class UnpackTimeout(UntrustedSandbox):
    """A pack or tarball took longer to read than it may."""

    code = "unpack-timeout"
    default_hint = (
        "Nothing was stored and the head did not move. If it is only large, raise [timing] unpack in the config; else look at"
        " where it comes from."
    )


class SearchError(SidecarError):
    """The database that is searched failed in a way that has no code of its own. No export waits for it."""

    code = "index-failed"
    default_hint = "Look at the database's log or the disk; `memory-sidecar index` then brings it up to date."


class SearchUnreachable(SearchError):
    """Postgres did not answer."""

    code = "index-unreachable"
    retryable = True
    default_hint = "Check that Postgres runs and can be reached. What it misses is caught up with by itself."


class SearchBusy(SearchError):
    """The search index is busy: a lock or a time limit stopped the query."""

    code = "index-busy"
    retryable = True
    default_hint = "Try again in a moment; what is missing is caught up with by itself."


class IndexReset(SearchError):
    """The search index on this machine was damaged. It is empty now, and is built again from the store."""

    code = "index-reset"
    retryable = True
    default_hint = "Search again: what is in the store is read again. Nothing else is affected."


class SearchDenied(SearchError):
    """Postgres refused the password or what the role may do, or the folder of the index cannot be used."""

    code = "index-denied"
    default_hint = "The role needs to create a schema, or to own the one in [postgres] schema; see docs/search.md."


class SearchUnfit(SearchError):
    """The index cannot hold what it has to."""

    code = "index-unfit"
    default_hint = "Use a Postgres database with the encoding UTF8; see docs/search.md."


class AccessDenied(SidecarError):
    """The token may not do that, or not with that memory."""

    code = "forbidden"
    default_hint = (
        "Ask whoever runs the service for a token that may: `memory-sidecar token list` shows those there are."
    )


class MemoryNotWatched(AccessDenied):
    """A sandbox names a memory that no ``[[watch]]`` allows, or what is no memory's id."""

    code = "memory-not-watched"
    default_hint = "Name another memory in the sandbox's metadata, or add it to the memories of a [[watch]]."


class TokenExpired(AccessDenied):
    """The token was good until a time that is over."""

    code = "token-expired"
    default_hint = "Ask whoever runs the service for a new one: `memory-sidecar token create`."


class RateLimited(SidecarError):
    """The token calls more often, or does more at once, than it may.

    ``seconds`` is how long to wait.
    """

    code = "rate-limited"
    retryable = True
    default_hint = "Wait as long as Retry-After says, then send the same request again."

    def __init__(self, message: str, *, seconds: float = 1.0) -> None:
        super().__init__(message)
        self.seconds = seconds


class LimitExceeded(SidecarError):
    """The memory is larger than a limit allows. The head did not move.

    ``code`` says which limit: limit-bytes, limit-file-bytes, limit-files, limit-depth, limit-packed, limit-memory-bytes,
    limit-store-bytes.
    """

    code = "limit-exceeded"
    exit_code = 3
    default_hint = "Raise the limit in the config's [limits], or make the memory smaller; nothing was lost."


class QuotaBytes(LimitExceeded):
    """The memories of the token would take more in the store than it may have. The head did not move."""

    code = "quota-bytes"
    default_hint = "Forget snapshots or delete memories that are not needed, or ask for a token with a larger quota."


class QuotaMemories(LimitExceeded):
    """The token has as many memories as it may have. Nothing was stored."""

    code = "quota-memories"
    default_hint = "Delete a memory that is not needed, or ask for a token with a larger quota."


class Interrupted(SidecarError):
    """The command was interrupted before it was done."""

    code = "interrupted"
    retryable = True
    exit_code = 130
    default_hint = "Head and sandbox are each as they were or wholly new; the same command may be given again."
