"""Opens stores, sandboxes and search databases by their references. The only module that imports adapters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.errors import BadReference, DriverMissing
from sidecar.layouts import Layout
from sidecar.policy.local_folders import OF_OUR_OWN, LocalPolicy
from sidecar.ports import Sandbox, SandboxProvider, Store
from sidecar.search.settings import OFF, SEALED, Postgres, Search, read_postgres_url

if TYPE_CHECKING:
    from sidecar.search.port import SearchDatabase
    from sidecar.search.upkeep import SearchIndex
    from sidecar.store.encryption.given_keys import GivenKeys
    from sidecar.store.manifest import Manifest
    from sidecar.store.repository import Repository


def open_store(url: str) -> Store:
    """Open the store behind a URL. Raise ``BadReference`` if it is not a store's URL."""
    from adapters.stores.urls import open_store as open_by_url

    return open_by_url(url)


def open_repository(url: str, given: GivenKeys, *, trust_unsigned: bool = False) -> Repository:
    """Open the repository in the store behind a URL. Raise ``BadReference`` or ``BadConfig``."""
    return build_repository(open_store(url), given, trust_unsigned=trust_unsigned)


def build_repository(store: Store, given: GivenKeys, *, trust_unsigned: bool = False) -> Repository:
    """Build the repository of a store, encrypted and signed with the keys given. Raise ``BadConfig``.

    The encrypting and signing layers are there even without keys: a store that is encrypted or signed must not be taken
    for an empty one, or be written to.
    """
    from sidecar.store.encryption.encrypted_store import EncryptedStore
    from sidecar.store.encryption.opening import EncryptionKeys
    from sidecar.store.encryption.signatures import Signatures
    from sidecar.store.encryption.signed_store import SignedStore
    from sidecar.store.folder_names import PortableStore
    from sidecar.store.head_copies import HeadCopies
    from sidecar.store.repository import Repository

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
    """Return the folder of a store on this machine; ``None`` for other stores. Raise ``BadReference``."""
    from adapters.stores.urls import find_folder

    return find_folder(url)


_USER = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}"


def open_sandbox(ref: str, *, wake: bool = False, user: str = "", local: LocalPolicy = OF_OUR_OWN) -> Sandbox:
    """Open the sandbox ``provider:id``; with ``wake``, start it if it is asleep. ``user`` is the user whose home is
    used, and as whom commands run and files are written; empty: the provider's default, in its working folder.

    Raise ``BadReference``, or ``SandboxNotAllowed`` for a folder of this machine that ``local`` does not allow.
    """
    if user and not re.fullmatch(_USER, user):
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


def open_provider(provider: str, *, local: LocalPolicy = OF_OUR_OWN) -> SandboxProvider:
    """Open who creates and ends sandboxes at ``e2b``, ``daytona`` or on this machine (``local``). Raise ``BadReference``."""
    from adapters.sandboxes.providers import open_account

    return open_account(provider, local)


def find_missing_key(provider: str) -> str:
    """Return the environment variable with a provider's key if this process lacks it; else ""."""
    from adapters.sandboxes.providers import find_missing_key as find

    return find(provider)


def open_search(settings: Postgres) -> SearchDatabase | None:
    """Open the search database; ``None`` if none is configured. Raise ``BadConfig`` or ``DriverMissing``."""
    url = read_postgres_url(settings)
    if not url:
        return None
    try:
        from adapters.search.postgres import open_postgres
    except ImportError:
        raise DriverMissing(
            f"{settings.url_env} is set, but what talks to Postgres is not installed.",
            hint="pip install 'memory-sidecar[postgres]'",
        ) from None
    return open_postgres(url, settings)


def open_index(
    repository: Repository, search: Search, postgres: Postgres, layouts: Mapping[str, Layout] | None = None
) -> SearchIndex | None:
    """Open the search index of a store: in Postgres if that is configured, else on this machine. ``None`` if that is off,
    as it is for an encrypted store unless the settings say how it may lie here. Raise ``BadConfig`` or ``DriverMissing``."""
    database = open_search(postgres)
    embedded = database is None
    database = database or open_embedded(repository, search)
    if database is None:
        return None
    from sidecar.engine.histories import read_line
    from sidecar.search.upkeep import SearchIndex

    async def read_manifests(memory: str, snapshot: str) -> list[Manifest]:
        return [manifest for manifest, _ in await read_line(repository, memory, snapshot)]

    return SearchIndex(
        repository,
        database,
        layouts,
        read_line=read_manifests,
        keep_history=search.history,
        embedded=embedded,
    )


def open_embedded(repository: Repository, settings: Search) -> SearchDatabase | None:
    """Open the search index on this machine; ``None`` if it is off."""
    from sidecar.store.encryption.encrypted_store import find_encryption

    encryption = find_encryption(repository.store)
    if settings.embedded == OFF or (encryption is not None and not settings.embedded):
        return None
    from adapters.search.sqlite import EmbeddedSearch, find_cache_folder
    from adapters.search.sqlite_files import open_plain

    base = Path(settings.folder).expanduser() if settings.folder else find_cache_folder()
    if settings.embedded != SEALED:
        return EmbeddedSearch(base, open_plain)
    from adapters.search.sqlite_sealed import SealedOpener

    return EmbeddedSearch(base, SealedOpener(encryption, settings.sealed_bytes).open)
