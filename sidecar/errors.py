"""Everything that can go wrong, on one screen.

    SidecarError
    ├── UsageError                 exit 2   what was asked for makes no sense
    │   ├── BadMemoryId · BadReference · BadConfig · UnknownLayout · UnknownReason
    │   ├── NothingToAccept        that snapshot does not stand beside the head
    │   └── NoIndex · DriverMissing
    ├── StoreError                 exit 1
    │   ├── StoreUnreachable       (a retry can help)
    │   ├── StoreDenied · StoreMissing · StoreFull · StoreUnsafe
    │   ├── EncryptionRefused      the server does not encrypt as the store's URL asks
    │   ├── KeyRefused             the server takes no object of that name
    │   ├── SecondWriter           another sidecar writes to a store that only one may write to
    │   ├── KeyNeeded              it is sealed or signed, and the key for that was not given
    │   ├── ObjectMissing          an object the store should hold is not there
    │   └── HeadMoved              compare-and-swap lost: someone else wrote first
    ├── SnapshotError              exit 1
    │   ├── MemoryNotFound · SnapshotNotFound
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
    │   └── NotSavedFirst          what a restore would replace could not be saved
    ├── UntrustedSandbox           exit 1   what came out of a sandbox or tarball was refused
    │   ├── BadAnswer · OutputTooLarge · MemoryMismatch
    │   ├── UnsafePath · UnsafeLink · UnsafeMember
    │   ├── SizeMismatch · DigestMismatch · PackBomb
    │   └── UnpackTimeout          it took longer to read than it may
    ├── SinkError                  exit 1   the database that is searched; never in the way of an export
    │   ├── SinkUnreachable · SinkBusy   (a retry can help)
    │   └── SinkDenied · SinkUnfit
    ├── LimitExceeded              exit 3   more than the limits allow; the head did not move
    └── Interrupted                exit 130 told to end before it was done (a retry can help)

Each class carries a stable ``code`` for programs, ``retryable`` for callers, and each instance a message (what happened)
and a hint (what to do) for people.
"""

from __future__ import annotations

from typing import ClassVar


class SidecarError(Exception):
    """The root. Nothing the product raises on purpose is outside this tree."""

    code: str = "failed"
    retryable: bool = False
    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint
        if code:
            self.code = code

    def __str__(self) -> str:
        """Both, for whoever prints it or lets it end the program."""
        return f"{self.message} {self.hint}".rstrip()

    def as_dict(self) -> dict[str, object]:
        return {"code": self.code, "message": self.message, "hint": self.hint, "retryable": self.retryable}


class UsageError(SidecarError):
    code = "usage"
    exit_code = 2


class BadMemoryId(UsageError):
    code = "bad-memory-id"
    default_hint = "Use 1 to 200 characters; '/' may separate parts, but no part may be empty, '.' or '..'."


class BadReference(UsageError):
    code = "bad-reference"


class BadConfig(UsageError):
    """``at`` is where in the file the wrong setting is: its section and key."""

    code = "bad-config"

    def __init__(self, message: str, *, hint: str = "", at: tuple[str | int, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.at = at


class UnknownLayout(UsageError):
    code = "unknown-layout"


class UnknownReason(UsageError):
    code = "unknown-reason"


class NothingToAccept(UsageError):
    code = "nothing-to-accept"
    default_hint = "`memory-sidecar log MEMORY` shows which snapshots were rejected, or have diverged."


class NoIndex(UsageError):
    code = "no-index"
    default_hint = "Set MEMORY_SIDECAR_POSTGRES to the URL of a Postgres database; see docs/search.md."


class DriverMissing(UsageError):
    code = "driver-missing"


class StoreError(SidecarError):
    code = "store-failed"


class StoreUnreachable(StoreError):
    code = "store-unreachable"
    retryable = True
    default_hint = "Check the endpoint and the network, then run the same command again; that is always safe."


class StoreDenied(StoreError):
    code = "store-denied"
    default_hint = "Check the credentials and that they may read, write, list and delete under this prefix."


class StoreMissing(StoreError):
    code = "store-missing"


class StoreFull(StoreError):
    code = "store-full"
    default_hint = "Free some space or enlarge the disk, then run the same command again; the head did not move."


class StoreUnsafe(StoreError):
    code = "store-no-conditional-writes"


class EncryptionRefused(StoreError):
    code = "store-encryption-refused"


class KeyRefused(StoreError):
    code = "store-key-refused"


class SecondWriter(StoreError):
    code = "store-second-writer"
    default_hint = "Let one sidecar write to this store at a time: stop the other, or have it done by that one."


class KeyNeeded(StoreError):
    code = "key-needed"
    default_hint = (
        "Set [encryption] identity_files (MEMORY_SIDECAR_IDENTITY_FILE) or passphrase_file (MEMORY_SIDECAR_PASSPHRASE_FILE)"
        " to the key this store was sealed for. Nothing was changed."
    )


class ObjectMissing(StoreError):
    code = "object-missing"


class HeadMoved(StoreError):
    code = "head-moved"
    retryable = True


class SnapshotError(SidecarError):
    code = "snapshot-failed"


class MemoryNotFound(SnapshotError):
    code = "memory-not-found"
    default_hint = "`memory-sidecar list` shows the memories of this store."


class SnapshotNotFound(SnapshotError):
    code = "snapshot-not-found"
    default_hint = "`memory-sidecar log MEMORY` shows its snapshots."


class SnapshotDamaged(SnapshotError):
    code = "snapshot-damaged"
    default_hint = "`memory-sidecar verify MEMORY` shows which snapshots are whole."


class UnknownFormat(SnapshotDamaged):
    code = "unknown-format"
    default_hint = "Update the sidecar."


class ObjectRefused(SnapshotDamaged):
    """``version`` is what a swap that replaces the object must still find."""

    code = "object-refused"

    def __init__(self, message: str, *, version: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.version = version


class NotSigned(ObjectRefused):
    code = "not-signed"
    default_hint = (
        "Somebody else wrote it, or it is from before signing was turned on: then `memory-sidecar rekey --trust-unsigned`"
        " signs what is there."
    )


class BaseCollected(SnapshotError):
    code = "base-collected"
    retryable = True
    default_hint = "Run the same command again: it starts from what is in the store now. The head did not move."


class SandboxError(SidecarError):
    code = "sandbox-failed"


class SandboxNotFound(SandboxError):
    code = "sandbox-not-found"


class SandboxGone(SandboxError):
    code = "sandbox-gone"
    default_hint = (
        "What was exported before is safe: `memory-sidecar log MEMORY` shows it; restore it into a new sandbox."
    )


class SandboxAsleep(SandboxError):
    code = "sandbox-asleep"
    default_hint = "Add --wake to start it again for this, or start it yourself."


class SandboxDenied(SandboxError):
    code = "sandbox-denied"


class SandboxNotAllowed(SandboxError):
    code = "sandbox-not-allowed"


class SandboxFull(SandboxError):
    code = "disk-full"
    default_hint = "Free some space in the sandbox, then try again; the memory there is as it was."


class SandboxUnwritable(SandboxError):
    code = "sandbox-unwritable"
    default_hint = (
        "Make /tmp in the sandbox a folder that this user may write to, or name another user with --user, then try again;"
        " the memory there is as it was."
    )


class SdkMissing(SandboxError):
    code = "sdk-missing"


class SandboxUnreachable(SandboxError):
    code = "sandbox-unreachable"
    retryable = True
    default_hint = "Check the network and the provider's status, then run the same command again; that is always safe."


class SandboxBusy(SandboxError):
    code = "sandbox-busy"
    retryable = True
    default_hint = "Wait a little, then run the same command again; that is always safe."


class SandboxTimeout(SandboxError):
    code = "sandbox-timeout"
    retryable = True
    default_hint = (
        "Raise [timing] command in the config, or look at what the sandbox is busy with; the head did not move."
    )


class TransferFailed(SandboxError):
    code = "transfer-failed"
    retryable = True
    default_hint = "Run the same command again; that is always safe."


class ProgramFailed(SandboxError):
    code = "sandbox-program-failed"


class NotSavedFirst(SandboxError):
    code = "unsaved"
    default_hint = "Export it, or say --discard to lose it. The sandbox is as it was."


class UntrustedSandbox(SidecarError):
    code = "untrusted"
    default_hint = (
        "Nothing was stored and the head did not move. Look at what runs in that sandbox before trying again."
    )


class BadAnswer(UntrustedSandbox):
    code = "bad-answer"


class OutputTooLarge(UntrustedSandbox):
    code = "output-too-large"


class MemoryMismatch(UntrustedSandbox):
    code = "memory-mismatch"


class UnsafePath(UntrustedSandbox):
    code = "unsafe-path"


class UnsafeLink(UntrustedSandbox):
    code = "unsafe-link"


class UnsafeMember(UntrustedSandbox):
    code = "unsafe-member"


class SizeMismatch(UntrustedSandbox):
    code = "size-mismatch"
    retryable = True


class DigestMismatch(UntrustedSandbox):
    code = "digest-mismatch"
    retryable = True


class PackBomb(UntrustedSandbox):
    code = "pack-bomb"


class UnpackTimeout(UntrustedSandbox):
    code = "unpack-timeout"
    default_hint = (
        "Nothing was stored and the head did not move. If it is only large, raise [timing] unpack in the config; else look at"
        " where it comes from."
    )


class SinkError(SidecarError):
    code = "index-failed"


class SinkUnreachable(SinkError):
    code = "index-unreachable"
    retryable = True
    default_hint = "Check that Postgres runs and can be reached. What it misses is caught up with by itself."


class SinkBusy(SinkError):
    code = "index-busy"
    retryable = True
    default_hint = "Try again in a moment; what is missing is caught up with by itself."


class SinkDenied(SinkError):
    code = "index-denied"
    default_hint = "The role needs to create a schema, or to own the one in [postgres] schema; see docs/search.md."


class SinkUnfit(SinkError):
    code = "index-unfit"


class LimitExceeded(SidecarError):
    """``code`` says which limit: limit-bytes, limit-file-bytes, limit-files, limit-depth, limit-packed, limit-memory-bytes,
    limit-store-bytes."""

    code = "limit-exceeded"
    exit_code = 3
    default_hint = "Raise the limit in the config's [limits], or make the memory smaller; nothing was lost."


class Interrupted(SidecarError):
    code = "interrupted"
    retryable = True
    exit_code = 130
    default_hint = "Head and sandbox are each as they were or wholly new; the same command may be given again."
