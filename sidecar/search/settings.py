"""The settings of search: the index on this machine, and Postgres."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from sidecar.errors import BadConfig, NoIndex
from sidecar.host.sections import check_least
from sidecar.host.values import dataclass

URL_VARIABLE = "MEMORY_SIDECAR_POSTGRES"
HOW = "Write postgresql://user:password@host:5432/database; in a password, @ is %40, / is %2F, # is %23, % is %25."
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}\Z")


PLAIN, SEALED, OFF = "plain", "sealed", "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    embedded: str = ""
    """How the index on this machine lies on its disk, if there is no Postgres: "plain", "sealed" (encrypted with the
    store's keys, in memory while it is used) or "off". Not set: "plain", and "off" for a store that is encrypted."""
    folder: str = ""
    """Where it is; empty: `memory-sidecar/search` in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    sealed_bytes: int = 256 << 20
    """How large a sealed index may become."""
    history: bool = False
    """Keep the past of every memory searchable all the time, not only where a search has asked for it. In Postgres too."""


def check_search(settings: Search) -> Search:
    """Return the settings. Raise ``BadConfig`` if they make no sense."""
    if settings.embedded not in ("", PLAIN, SEALED, OFF):
        raise BadConfig(f'[search] embedded must be "{PLAIN}", "{SEALED}" or "{OFF}".', at=("search", "embedded"))
    if settings.folder and not os.path.isabs(os.path.expanduser(settings.folder)):
        raise BadConfig("[search] folder must be a whole path.", at=("search", "folder"))
    check_least(settings, "search", {"sealed_bytes": 1 << 20})
    return settings


def explain_no_index(*, encrypted: bool) -> NoIndex:
    """Return the error that says why there is nothing to search in."""
    if encrypted:
        return NoIndex(
            "This store is encrypted, and nobody has said how its search index may lie on this disk.",
            hint='Set [search] embedded = "sealed" (encrypted too) or "plain" (readable), or use Postgres; see docs/search.md.',
        )
    return NoIndex("[search] embedded is off, and no Postgres database is set.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Postgres:
    """The URL holds a password, so it is no option: it stays in the environment, and is never shown."""

    url_env: str = URL_VARIABLE
    """The environment variable that holds the URL; when it is not set, the index is on this machine: `[search]`."""
    schema: str = "memory_sidecar"
    """The Postgres schema of the tables. Made when it is not there."""
    text_search: str = "simple"
    """The text search configuration: "simple" for any language, "english" and others also find inflected words."""
    timeout: float = 10.0
    """Seconds to wait for a connection, and for a search."""
    wait: float = 10.0
    """Seconds that a command waits for its rows to be written, after its receipt is decided."""
    every: float = 300.0
    """Seconds between two looks of a service at which memories' rows are behind."""


def check_postgres(settings: Postgres) -> Postgres:
    """Return the settings. Raise ``BadConfig`` if they cannot work. The URL is checked, not connected to."""
    for name in ("schema", "text_search"):
        if not _NAME.match(getattr(settings, name)):
            raise BadConfig(
                f"[postgres] {name} is not valid: it has lower-case letters, digits and '_'.", at=("postgres", name)
            )
    if settings.schema.startswith("pg_") or settings.schema == "public":
        raise BadConfig(
            f"[postgres] schema must be one of its own, not {settings.schema!r}.", at=("postgres", "schema")
        )
    for name in ("timeout", "every"):
        if getattr(settings, name) < 1:
            raise BadConfig(f"[postgres] {name} must be at least a second.", at=("postgres", name))
    url = read_postgres_url(settings)
    if not url and settings.url_env != URL_VARIABLE:
        raise BadConfig(
            f"{settings.url_env}, which is to hold the URL of Postgres, is not set.", at=("postgres", "url_env")
        )
    if url and not _is_url(url):
        # The message quotes nothing of it: any part may be a password.
        raise BadConfig(f"{settings.url_env} is not the URL of a Postgres database.", hint=HOW)
    return settings


def read_postgres_url(settings: Postgres) -> str:
    """Return the database's URL; ``""`` if there is none."""
    return os.environ.get(settings.url_env, "").strip()


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        if "," not in parts.netloc:  # several hosts may be given, each with its port
            _ = parts.port
    except ValueError:
        return False
    # An unescaped @ in a password: the rest of it would be taken as the host.
    if parts.netloc.count("@") > 1 or "@" in parts.path:
        return False
    return parts.scheme in ("postgres", "postgresql") and bool(parts.netloc or parts.path.strip("/") or parts.query)
