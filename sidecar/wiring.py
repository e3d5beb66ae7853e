"""The one place that knows which adapters there are."""

from __future__ import annotations

from pathlib import Path

from sidecar.errors import BadReference
from sidecar.ports import Sandbox, Store


def open_store(url: str) -> Store:
    """The store behind a URL. Raise ``BadReference`` when it is not one."""
    from adapters.stores.urls import open_store as open_by_url

    return open_by_url(url)


def open_sandbox(ref: str) -> Sandbox:
    """The sandbox behind ``provider:id``. Raise ``BadReference`` or ``SandboxNotFound``."""
    provider, colon, name = ref.partition(":")
    if provider == "local" and colon:
        from adapters.sandboxes.local import open_local

        return open_local(name)
    raise BadReference(f"{ref!r} is not a sandbox this version knows.", hint="Write local:/path/to/home.")


def open_home(home: Path) -> Sandbox:
    """A folder of our own as a sandbox."""
    return open_sandbox(f"local:{home}")
