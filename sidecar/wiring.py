"""The one place that knows which adapters there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.errors import BadReference, DriverMissing
from sidecar.local_policy import OF_OUR_OWN, LocalPolicy
from sidecar.ports import Sandbox, Store
from sidecar.sink.settings import Postgres, read_postgres_url

if TYPE_CHECKING:
    from sidecar.repository import Repository
    from sidecar.sealing.given import GivenKeys
    from sidecar.sink.indexing import MemoryIndex
    from sidecar.sink.sink import SearchDatabase


def open_store(url: str) -> Store:
    """The store behind a URL. Raise ``BadReference`` when it is not one."""
    from adapters.stores.urls import open_store as open_by_url

    return open_by_url(url)


def open_repository(url: str, given: GivenKeys, *, trust_unsigned: bool = False) -> Repository:
    """The memories in the store behind a URL. Raise ``BadReference`` or ``BadConfig``."""
    return build_repository(open_store(url), given, trust_unsigned=trust_unsigned)


def build_repository(store: Store, given: GivenKeys, *, trust_unsigned: bool = False) -> Repository:
    """The memories in a store, sealed and signed with the keys given. Raise ``BadConfig``.

    Also without keys: a store that is encrypted or signed must not be taken for an empty one, or be written to.
    """
    from sidecar.repository import Repository
    from sidecar.sealing.opening import EncryptionKeys
    from sidecar.sealing.signatures import Signatures
    from sidecar.sealing.signed import SignedStore
    from sidecar.sealing.store import EncryptedStore
    from sidecar.snapshots.portable import PortableStore
    from sidecar.snapshots.witnesses import HeadCopies

    signatures = Signatures(given.signing_key, given.trusted) if given.signs else None
    keys = None
    if given.encrypts:
        keys = EncryptionKeys(
            recipients=given.recipients,
            identities=given.identities,
            passphrase=given.passphrase,
            previous_passphrase=given.previous_passphrase,
            signatures=signatures,
            trust_unsigned=trust_unsigned,
        )
    signed = SignedStore(EncryptedStore(PortableStore(store), keys), signatures, trust_unsigned=trust_unsigned)
    return Repository(signed, HeadCopies(signed) if signatures else None)


def find_store_folder(url: str) -> Path | None:
    """The folder that a store is in, where that is one on this machine. Raise ``BadReference``."""
    from adapters.stores.urls import find_folder

    return find_folder(url)


_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}\Z")


def open_sandbox(ref: str, *, wake: bool = False, user: str = "", local: LocalPolicy = OF_OUR_OWN) -> Sandbox:
    """The sandbox behind ``provider:id``; ``wake``: one that is asleep is to be started. ``user`` is as whom its commands
    run, in that one's home, and files are written; "": as whoever its provider takes, in its working folder.

    Raise ``BadReference``, or ``SandboxNotAllowed`` for a folder of this machine that ``local`` does not let be one.
    """
    if user and not _USER.match(user):
        raise BadReference(f"{user[:80]!r} is no name of a user.", hint="Write --user NAME, as `id -un` says it there.")
    provider, colon, name = ref.partition(":")
    if provider == "local" and colon:
        from adapters.sandboxes.local import open_local

        return open_local(name, local, user)
    if provider == "e2b" and colon:
        from adapters.sandboxes.e2b import open_e2b

        return open_e2b(name, wake=wake, user=user)
    if provider == "daytona" and colon:
        from adapters.sandboxes.daytona import open_daytona

        return open_daytona(name, wake=wake, user=user)
    raise BadReference(
        f"{ref!r} is not a sandbox.", hint="Write e2b:<sandbox id>, daytona:<id or name> or local:/path/to/home."
    )


def open_home(home: Path) -> Sandbox:
    """A folder of our own as a sandbox."""
    return open_sandbox(f"local:{home}")


def open_search(settings: Postgres) -> SearchDatabase | None:
    """Where records go, to be searched; ``None`` when that is nowhere. Raise ``BadConfig`` or ``DriverMissing``."""
    url = read_postgres_url(settings)
    if not url:
        return None
    try:
        from adapters.sinks.postgres import open_postgres
    except ImportError:
        raise DriverMissing(
            f"{settings.url_env} is set, but what talks to Postgres is not installed.",
            hint="pip install 'memory-sidecar[postgres]'",
        ) from None
    return open_postgres(url, settings)


def open_index(repository: Repository, settings: Postgres) -> MemoryIndex | None:
    """What makes a store's memories searchable, where something does. Raise ``BadConfig`` or ``DriverMissing``."""
    sink = open_search(settings)
    if sink is None:
        return None
    from sidecar.sink.indexing import MemoryIndex

    return MemoryIndex(repository, sink)
