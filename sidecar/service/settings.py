"""The settings of a service and of webhooks, and their checks."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from sidecar.errors import BadConfig, BadMemoryId, UsageError
from sidecar.host.loopback import is_loopback
from sidecar.host.sections import check_cron, check_least
from sidecar.host.text import suggest
from sidecar.host.values import dataclass
from sidecar.ids import check_memory_id
from sidecar.policy.local_folders import LocalPolicy
from sidecar.service.access.grants import check_patterns
from sidecar.service.door.authorities import ANY, Authority

if TYPE_CHECKING:
    from sidecar.host.cron import Cron

FORMS = ("auto", "json", "console")
LEAST = {
    "concurrency": 1,
    "uploads": 1,
    "body_bytes": 1,
    "lease": 1,
    "checkpoint_every": 1,
    "connections": 8,
    "header_timeout": 1,
    "body_timeout": 1,
}
AUTO, OFF = "auto", "off"
WATCHED = ("e2b", "daytona")
"""Providers whose listings have metadata."""
READER, WRITER = "reader", "writer"
SHORTEST_SECRET = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    bind: str = "127.0.0.1:8077"
    """Where to listen. Without a token only a loopback address is allowed."""
    hosts: list[str] = field(default_factory=list)
    """Names by which it may be called (the Host header), beside those of loopback: "sidecar.internal", "10.0.0.7:8077". Empty:
    none on a loopback address, any elsewhere."""
    token: str = AUTO
    """On loopback, where no token is given: "auto" makes one at the first start and keeps it for this user; "off" lets every
    program on this machine call."""
    token_file: str = ""
    """A file with bearer tokens, one a line; beside those in MEMORY_SIDECAR_TOKEN."""
    tokens: str = ""
    """A file with named tokens, each for some memories and verbs, made by `memory-sidecar token`. Empty: `tokens.json` beside
    the token that is kept for this user."""
    local_roots: list[str] = field(default_factory=list)
    """Folders of this machine that may be sandboxes (`local:`), with all they hold. Empty: on a loopback address any, on
    others none."""
    tls_cert: str = ""
    """A file with a certificate, and those of its issuers, to speak TLS with (PEM); with ``tls_key``."""
    tls_key: str = ""
    """The file with the certificate's private key (PEM), without a passphrase."""
    concurrency: int = 4
    """How many exports and restores run at once."""
    queue: int = 500
    """How many may wait; more are refused with 429."""
    body_bytes: int = 1 << 20
    """The largest request, tarballs to be adopted aside: those may be as large as a pack (``limits.packed_bytes``)."""
    uploads: int = 8
    """How many tarballs to be adopted may be on their way in at once; more are refused with 429."""
    connections: int = 600
    """How many connections may be open at once, fewer where the system allows few open files. Idle ones make room for new
    ones; where none is idle, more are refused with 503."""
    header_timeout: float = 10.0
    """Seconds that a caller may take to send the head of a request."""
    body_timeout: float = 60.0
    """Seconds for which a caller may stand still while it sends a body or has an answer to read."""
    grace: float = 25.0
    """Seconds to finish what runs and to save what is looked after, when told to stop."""
    log: str = "auto"
    """"json", "console", or "auto": words when a person watches; beside a command (``run``), warnings and errors only."""
    lease: float = 30.0
    """A service that was not heard of for so long has lost its attachments to another one on the same store."""
    checkpoint_every: float = 300.0
    """Seconds between two exports of a sandbox that is looked after, unless its restore or attachment says otherwise."""
    checkpoint_at: str = ""
    """When all sandboxes that are looked after are exported, as a cron expression ("55 17 * * 1-5"), beside
    ``checkpoint_every``."""
    drill_every: float = 86400.0
    """Seconds between two drills: a random snapshot is restored into a scratch sandbox. 0: never."""
    drill_at: str = ""
    """When a drill is run, as a cron expression, instead of ``drill_every``: "0 4 * * sun"."""
    timezone: str = "UTC"
    """The time zone of cron expressions, such as "Europe/Berlin"."""
    drill_bytes: int = 1 << 30
    """Larger snapshots are not drilled; so much must fit into the temporary folder."""
    lead: float = 60.0
    """So many seconds before a provider ends a sandbox it is exported."""

    def find_cron(self, text: str) -> Cron | None:
        """Return a cron expression in the service's time zone; ``None`` if it is empty."""
        if not text:
            return None
        from sidecar.host.cron import Cron, find_zone  # late: a command seldom has a schedule

        return Cron.parse(text, find_zone(self.timezone))


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    folder: str = ""
    """A folder with backups from before there was a sidecar (.tar.gz, .tgz, .tar.zst, .tar). When a service starts, each whose
    memory does not exist becomes one: conductor.tar.gz becomes "conductor". Files are only read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A memory that is to have a living sandbox."""

    memory: str
    """Its id."""
    on: str
    """The provider, and what a sandbox is made from there: "e2b:TEMPLATE", "daytona:SNAPSHOT" or "local:"."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Kept with the sandbox by its provider (Daytona: labels)."""
    timeout: float | None = None
    """Seconds until its provider ends it (Daytona: without activity). Default: the provider's."""
    must_exist: bool = False
    """A memory that is not there is an error, not a first start."""
    layouts: list[str] = field(default_factory=list)
    """Which layouts to export. Default: whatever is there."""
    projects: list[str] | None = None
    """Project folders in the sandbox. Default: where they were."""
    checkpoint_every: float | None = None
    """Seconds between exports. Default: as [service] says."""
    user: str = ""
    """Work in it as this user."""
    budget: int = 10
    """How many sandboxes may be created for it within an hour, failed attempts included, whichever service does."""
    backoff: float = 5.0
    """Seconds until it is tried again when a creation failed; doubled with each further failure, up to 15 minutes."""
    check_every: float = 15.0
    """Seconds between two looks at whether its sandbox lives."""


def check_start(table: Start, at: tuple[str | int, ...]) -> Start:
    """Return a table. Raise ``BadConfig`` if no sandbox could be created by it."""
    try:
        check_memory_id(table.memory)
    except BadMemoryId as problem:
        raise BadConfig(f"[[start]] memory: {problem.message}", hint=problem.hint, at=(*at, "memory")) from None
    if not re.fullmatch(r"[a-z0-9]+:.*", table.on):
        hint = 'Write on = "e2b:TEMPLATE", "daytona:SNAPSHOT" or "local:".'
        raise BadConfig(f"[[start]] on = {table.on!r} names no provider.", hint=hint, at=(*at, "on"))
    for key, least in {"budget": 1, "backoff": 1, "check_every": 1, "timeout": 1, "checkpoint_every": 1}.items():
        given = getattr(table, key)
        if given is not None and not least <= given < float("inf"):
            raise BadConfig(f"[[start]] {key} must be at least {least}.", at=(*at, key))
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Sandboxes at a provider that say in their metadata which memory they are to have."""

    provider: str
    """"e2b" or "daytona"."""
    memories: list[str]
    """Which memories a sandbox may name: ids and patterns such as "acme/*" (all below acme/). Others are refused."""
    memory_from: str = "metadata.memory"
    """Where a sandbox names its memory: "metadata.KEY" or, for Daytona, "labels.KEY"."""
    second: str = "reader"
    """A second living sandbox that names the same memory: "reader" restores it read-only, "writer" as the first."""
    must_exist: bool = False
    """A memory that is not there is an error, not a first start."""
    layouts: list[str] = field(default_factory=list)
    """Which layouts to export. Default: whatever is there."""
    projects: list[str] | None = None
    """Project folders in the sandbox. Default: where they were."""
    checkpoint_every: float = 30.0
    """Seconds between exports."""
    user: str = ""
    """Work in it as this user."""
    list_every: float = 2.0
    """Seconds between two listings of the provider's newest sandboxes; never more than one request a second, whatever there is
    to list. 0: none, webhooks alone."""
    secret_env: str = ""
    """The environment variable with the secret of the provider's webhooks. Empty: `/v1/hooks/…` refuses them all."""

    @property
    def key(self) -> str:
        """The key in a sandbox's metadata."""
        return self.memory_from.partition(".")[2]


def check_watch(table: Watch, at: tuple[str | int, ...]) -> Watch:
    """Return a table. Raise ``BadConfig`` if nothing could be found by it."""
    if table.provider not in WATCHED:
        hint = 'Write provider = "e2b" or "daytona". Sandboxes on this machine have no metadata.'
        raise BadConfig(f"[[watch]] provider = {table.provider!r} lists no sandboxes.", hint=hint, at=(*at, "provider"))
    place = table.memory_from.partition(".")[0]
    if place not in ("metadata", "labels") or not table.key:
        hint = 'Write memory_from = "metadata.memory", or "labels.memory".'
        raise BadConfig(
            f"[[watch]] memory_from = {table.memory_from!r} is no place in a sandbox's metadata.",
            hint=hint,
            at=(*at, "memory_from"),
        )
    from sidecar.policy.validation import find_mistake  # late: a command seldom has a watch

    for pattern in table.memories:
        if mistake := find_mistake(pattern):
            message = f"[[watch]] memories: {pattern!r} is no pattern: {mistake}."
            raise BadConfig(message, hint='Write memories = ["acme/*"].', at=(*at, "memories"))
    try:
        check_patterns(table.memories)
    except UsageError as problem:
        hint = 'Write memories = ["acme/*"], or ["*"] for every memory.'
        raise BadConfig(f"[[watch]] memories: {problem.message}", hint=hint, at=(*at, "memories")) from None
    if table.second not in (READER, WRITER):
        message = f'[[watch]] second must be "{READER}" or "{WRITER}", not {table.second!r}.'
        raise BadConfig(message, at=(*at, "second"))
    if not 1 <= table.checkpoint_every < float("inf"):
        raise BadConfig("[[watch]] checkpoint_every must be at least 1.", at=(*at, "checkpoint_every"))
    if table.list_every != 0 and not 1 <= table.list_every < float("inf"):
        hint = "0 lists nothing: then sandboxes are only found by webhooks."
        raise BadConfig("[[watch]] list_every must be at least 1, or 0.", hint=hint, at=(*at, "list_every"))
    if table.list_every == 0 and not table.secret_env:
        hint = "Set secret_env, to be called by webhooks, or let list_every be 2."
        raise BadConfig("[[watch]] finds nothing: no listing and no webhooks.", hint=hint, at=(*at, "list_every"))
    if table.secret_env and len(os.environ.get(table.secret_env, "")) < SHORTEST_SECRET:
        wrong = "is too short" if os.environ.get(table.secret_env) else "is not set"
        hint = (
            f"It holds the secret that the provider's webhooks are checked by, of {SHORTEST_SECRET} characters or more."
        )
        raise BadConfig(f"[[watch]] secret_env: {table.secret_env} {wrong}.", hint=hint, at=(*at, "secret_env"))
    return table


def check_adopt(settings: Adopt) -> Adopt:
    """Return the settings. Raise ``BadConfig`` if the folder cannot be one."""
    folder = os.path.expanduser(settings.folder)
    at = ("adopt", "folder")
    if folder and not os.path.isabs(folder):
        raise BadConfig(f"[adopt] folder = {settings.folder!r} is no absolute path.", hint="Begin it with /.", at=at)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise BadConfig(
            f"[adopt] folder: {folder} is no folder.", hint="Name the folder that the backups are in.", at=at
        )
    return settings


def check_service(settings: Service) -> Service:
    """Return the settings. Raise ``BadConfig`` if the service could not work with them."""
    check_least(settings, "service", LEAST)
    if settings.log not in FORMS:
        may_be = " or ".join(f'"{form}"' for form in FORMS)
        raise BadConfig(f"[service] log must be {may_be}, not {settings.log!r}.", at=("service", "log"))
    if settings.token not in (AUTO, OFF):
        # The value is not quoted in the message: it may be a token that was put here by mistake.
        hint = "A token itself goes into MEMORY_SIDECAR_TOKEN, or into the file that token_file names."
        raise BadConfig(f'[service] token must be "{AUTO}" or "{OFF}".', hint=hint, at=("service", "token"))
    for name in settings.hosts:
        if name != ANY and Authority.parse(name) is None:
            hint = "Write names such as sidecar.internal or 10.0.0.7:8077, without http://."
            raise BadConfig(f"[service] hosts: {name!r} is no name of a host.", hint=hint, at=("service", "hosts"))
    if bool(settings.tls_cert) != bool(settings.tls_key):
        missing = "tls_key" if settings.tls_cert else "tls_cert"
        raise BadConfig(f"[service] {missing} is missing: TLS needs both files.", at=("service", missing))
    parse_address(settings.bind)
    for key in ("checkpoint_at", "drill_at"):
        check_cron(getattr(settings, key), ("service", key))
    if settings.timezone != "UTC":
        _check_zone(settings.timezone)
    return settings


def _check_zone(name: str) -> None:
    from sidecar.host.cron import find_zone

    try:
        find_zone(name)
    except ValueError as problem:
        hint = str(problem) or 'Write a name such as "Europe/Berlin" or "UTC".'
        message = f"[service] timezone = {name!r} is no time zone."
        raise BadConfig(message, hint=hint, at=("service", "timezone")) from None


def narrow_local_policy(policy: LocalPolicy, settings: Service) -> LocalPolicy:
    """Return the policy with the service's restriction on which folders of this machine callers may name."""
    return replace(policy, confined=bool(settings.local_roots) or not is_loopback(parse_address(settings.bind)[0]))


def parse_address(bind: str) -> tuple[str, int]:
    """Return the host and port to listen on. Raise ``BadConfig`` if it is not an address."""
    host, colon, port = bind.rpartition(":")
    number = port.isascii() and port.isdecimal() and len(port) <= 5
    if not colon or not number or int(port) > 65535 or not host:
        hint = "Write host:port, such as 127.0.0.1:8077."
        raise BadConfig(f"{bind!r} is no address to listen on.", hint=hint, at=("service", "bind"))
    return host.strip("[]"), int(port)


def check_events(patterns: Sequence[str], at: tuple[str | int, ...]) -> None:
    """Raise ``BadConfig`` for a pattern that no event matches, or if there is none."""
    from sidecar.service.event_types import EVENTS  # late: a command seldom has webhooks

    for pattern in patterns:
        if not fnmatch.filter(EVENTS, pattern):
            hint = suggest(pattern, EVENTS, listed=True)
            raise BadConfig(f"A webhook's events has {pattern!r}, which no event matches.", hint=hint, at=at)
    if not patterns:
        raise BadConfig(
            "A webhook's events is empty, so it would never be called.", hint='Write events = ["*"].', at=at
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """Where to send which events."""

    url: str
    """Called with a POST for each event."""
    events: list[str] = field(default_factory=lambda: ["*"])
    """Patterns such as "sandbox.*" or "export.rejected"."""
    secret_env: str = ""
    """The environment variable that holds the secret which signs each call."""
