"""The configuration: a TOML file, a few environment variables, and defaults that need nothing but Python."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar

from sidecar.audit.settings import Audit, check_audit
from sidecar.config.lines import TomlLines
from sidecar.engine.core import RestoreSettings, Timing, check_restore, check_timing
from sidecar.errors import BadConfig, BadReference
from sidecar.host.sections import (
    PREFIX,
    check_known,
    check_value,
    convert,
    format_setting,
    list_given_keys,
    list_settable,
    name_variable,
    read_section,
    read_variable,
)
from sidecar.host.text import find_nearest
from sidecar.host.values import dataclass
from sidecar.layouts import Layout, load_built_in
from sidecar.layouts.custom import check_layout_patterns, read_custom_layouts
from sidecar.policy.limits import Guards, Limits
from sidecar.policy.privacy import Privacy
from sidecar.policy.retention import Retention, RetentionRules
from sidecar.policy.review import ExportCheck, Review, check_distinct, check_export_check, check_review
from sidecar.policy.validation import apply_required, check_guards, check_limits, check_privacy, check_retention
from sidecar.search.settings import Postgres, Search, check_postgres, check_search
from sidecar.service.settings import (
    Adopt,
    Service,
    Start,
    Watch,
    Webhook,
    check_adopt,
    check_events,
    check_service,
    check_start,
    check_watch,
)
from sidecar.store.encryption.given_keys import VARIABLES
from sidecar.store.encryption.settings import Encryption, Signing

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a user can set. A file may hold these keys and no others."""

    store: str = ""
    direct: bool = False
    """Let packs go straight between sandbox and bucket (``s3:`` stores)."""
    limits: Limits = Limits()
    guards: Guards = Guards()
    privacy: Privacy = Privacy()
    timing: Timing = Timing()
    retention: Retention = Retention()
    restore: RestoreSettings = RestoreSettings()
    service: Service = Service()
    adopt: Adopt = Adopt()
    search: Search = Search()
    postgres: Postgres = Postgres()
    encryption: Encryption = Encryption()
    signing: Signing = Signing()
    audit: Audit = Audit()
    webhooks: list[Webhook] = field(default_factory=list)
    start: list[Start] = field(default_factory=list)
    watch: list[Watch] = field(default_factory=list)
    review: Review = Review()
    checks: list[ExportCheck] = field(default_factory=list)
    layouts: Mapping[str, Layout] = field(default_factory=load_built_in)


def build_default_store() -> str:
    """Return the URL of the default store: a folder under the user's data home."""
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return f"file:{data}/memory-sidecar"


SECTIONS: dict[str, type[Any]] = {
    "limits": Limits,
    "guards": Guards,
    "privacy": Privacy,
    "timing": Timing,
    "retention": Retention,
    "review": Review,
    "restore": RestoreSettings,
    "service": Service,
    "adopt": Adopt,
    "search": Search,
    "postgres": Postgres,
    "encryption": Encryption,
    "signing": Signing,
    "audit": Audit,
}
OTHERS = {"STORE", "CONFIG", "TOKEN", "URL", "CA", "DIRECT", "POSTGRES", *VARIABLES}
"""The variables with the prefix other than SECTION_KEY."""


def load_config(path: str | None, *, store: str | None = None) -> Config:
    """Read the config from ``path``, or ``MEMORY_SIDECAR_CONFIG``, or only defaults. Environment variables
    ``MEMORY_SIDECAR_SECTION_KEY`` take precedence over the file, and ``store`` over everything.

    Raise ``BadConfig``, naming the line and the wrong key, and the nearest known one.
    """
    file = find_config_file(path)
    text = _read_text(file) if file else ""
    try:
        return _build_config(_parse_toml(text, file), store)
    except BadConfig as problem:
        raise add_location(problem, file, text) from None


def find_config_file(path: str | None) -> str:
    """Return the path of the config file; empty if there is none."""
    return path or os.environ.get("MEMORY_SIDECAR_CONFIG") or ""


def add_location(problem: BadConfig, file: str, text: str | None = None) -> BadConfig:
    """Return the problem with the variable or the line of the file that it is in."""
    message = problem.message
    for at, name in _list_set_variables().items():
        message = re.sub(re.escape(format_setting(at)) + r"(?!\w)", name, message)
        if at == problem.at:
            return BadConfig(message if name in message else f"{name}: {message}", hint=problem.hint)
    if file and problem.at:
        message = f"{_find_location(file, problem.at, text)}: {message}"
    return BadConfig(message, hint=problem.hint)


def add_store_location(problem: BadReference, path: str | None, store: str | None) -> BadReference:
    """Return a problem of the store's URL with the variable or the line that the URL was read from."""
    if store:
        return problem
    file, name = find_config_file(path), "MEMORY_SIDECAR_STORE"
    where = name if os.environ.get(name) else _find_location(file, ("store",)) if file else "store"
    return BadReference(f"{where}: {problem.message}", hint=problem.hint)


def _find_location(file: str, at: tuple[str | int, ...], text: str | None = None) -> str:
    line = TomlLines(_read_text(file) if text is None else text).of(at)
    return f"{file}:{line}" if line else file


def _list_set_variables() -> dict[tuple[str | int, ...], str]:
    """Return the options that the environment sets, each with its variable."""
    variables = {
        (name, entry.name): name_variable(name, entry.name)
        for name in SECTIONS
        for entry in list_settable(SECTIONS[name])
    }
    return {at: name for at, name in variables.items() if os.environ.get(name)}


def _build_config(table: dict[str, Any], store: str | None) -> Config:
    check_known(table, [entry.name for entry in fields(Config)], ())
    wanted = store or os.environ.get("MEMORY_SIDECAR_STORE") or table.get("store") or build_default_store()
    if not isinstance(wanted, str):
        raise BadConfig("store must be a text.", hint='Write store = "file:/var/lib/memories".', at=("store",))
    direct = read_variable("MEMORY_SIDECAR_DIRECT", bool)
    direct = table.get("direct", False) if direct is None else direct
    if not isinstance(direct, bool):
        raise BadConfig("direct must be true or false.", at=("direct",))
    layouts: Mapping[str, Layout] = load_built_in()
    if table.get("layouts"):
        layouts = {**layouts, **read_custom_layouts(table["layouts"])}
        check_layout_patterns(layouts.values())
    limits = check_limits(read_section(table, "limits", Limits), list_given_keys(table, "limits", Limits), layouts)
    guards = check_guards(read_section(table, "guards", Guards), layouts)
    timing = check_timing(read_section(table, "timing", Timing))
    return Config(
        store=wanted,
        direct=direct,
        limits=limits,
        guards=guards,
        privacy=check_privacy(read_section(table, "privacy", Privacy), layouts),
        timing=timing,
        retention=_build_retention(table, timing),
        restore=check_restore(read_section(table, "restore", RestoreSettings)),
        service=check_service(read_section(table, "service", Service)),
        adopt=check_adopt(read_section(table, "adopt", Adopt)),
        search=check_search(read_section(table, "search", Search)),
        postgres=check_postgres(read_section(table, "postgres", Postgres)),
        encryption=read_section(table, "encryption", Encryption),
        signing=read_section(table, "signing", Signing),
        audit=check_audit(read_section(table, "audit", Audit)),
        webhooks=_build_webhooks(table.get("webhooks", [])),
        start=_build_starts(table.get("start", [])),
        watch=_build_watches(table.get("watch", [])),
        review=check_review(read_section(table, "review", Review)),
        checks=_build_checks(table.get("checks", [])),
        layouts=apply_required(layouts, guards) if guards.layouts else layouts,
    )


def list_unknown_variables() -> dict[str, str]:
    """Return variables with the sidecar's prefix that it does not know, each with the nearest known one."""
    known = {name_variable(name, entry.name) for name, kind in SECTIONS.items() for entry in list_settable(kind)}
    known |= {PREFIX + name for name in OTHERS}
    found = [name for name in os.environ if name.startswith(PREFIX) and name not in known]
    return {name: find_nearest(name, known) for name in sorted(found)}


def _read_tables(rows: Any, name: str, kind: type[T]) -> Iterator[tuple[tuple[str | int, ...], T]]:
    """Yield each table of a list, as ``[[name]]`` writes them, with its place. Raise ``BadConfig``."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadConfig(f"{name} must be written as [[{name}]].", at=(name,))
    for place, row in enumerate(rows):
        check_known(row, kind.__dataclass_fields__, (name, place))  # type: ignore[attr-defined]
        yield (name, place), convert(row, kind, (name, place))


def _build_webhooks(rows: Any) -> list[Webhook]:
    hooks = []
    for at, hook in _read_tables(rows, "webhooks", Webhook):
        if not hook.url.startswith(("http://", "https://")):
            raise BadConfig("A webhook's url must begin with http:// or https://.", at=(*at, "url"))
        if hook.secret_env and not os.environ.get(hook.secret_env):
            raise BadConfig(
                f"{hook.secret_env}, which is to sign a webhook's calls, is not set.",
                at=(*at, "secret_env"),
            )
        check_events(hook.events, (*at, "events"))
        hooks.append(hook)
    return hooks


def _build_starts(rows: Any) -> list[Start]:
    tables: list[Start] = []
    for at, row in _read_tables(rows, "start", Start):
        table = check_start(row, at)
        if any(table.memory == other.memory for other in tables):
            hint = "A memory has one sandbox by itself. Others are started by a call."
            raise BadConfig(f"[[start]] is there twice for {table.memory}.", hint=hint, at=(*at, "memory"))
        tables.append(table)
    return tables


def _build_watches(rows: Any) -> list[Watch]:
    return [check_watch(table, at) for at, table in _read_tables(rows, "watch", Watch)]


def _build_checks(rows: Any) -> list[ExportCheck]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadConfig("checks must be written as [[checks]].", at=("checks",))
    checks = []
    for place, row in enumerate(rows):
        at = ("checks", place)
        check_known(row, [entry.name for entry in fields(ExportCheck)], at)
        if "command" not in row:
            hint = 'Write command = ["/usr/local/bin/check-memory"].'
            raise BadConfig("A check needs a command.", hint=hint, at=at)
        checks.append(check_export_check(convert(row, ExportCheck, at), at))
    check_distinct(checks)
    return checks


def _read_text(file: str) -> str:
    try:
        return Path(file).read_text("utf-8")
    except OSError as problem:
        raise BadConfig(f"The config {file} cannot be read: {problem.strerror}.") from None
    except UnicodeDecodeError as problem:
        raise BadConfig(f"The config {file} is not TOML: {problem}.") from None


def _build_retention(table: dict[str, Any], timing: Timing) -> Retention:
    rows = table.get("retention", {})
    tables = rows.get("memories", {}) if isinstance(rows, dict) else {}
    memories: dict[str, dict[str, Any]] = {}
    for pattern, rules in tables.items() if isinstance(tables, dict) else ():
        at = ("retention", "memories", pattern)
        if not isinstance(rules, dict):
            raise BadConfig(f"{format_setting(at)} must be a table.", at=at)
        check_known(rules, RetentionRules.__dataclass_fields__, at)
        memories[pattern] = {key: check_value(value, (*at, key)) for key, value in rules.items()}
    if memories:
        table = {**table, "retention": {**rows, "memories": memories}}
    retention = read_section(table, "retention", Retention)
    keys = {key: set(memories[key]) for key in memories}
    check_retention(retention, {"": list_given_keys(table, "retention", Retention), **keys}, timing.command)
    return retention


def _parse_toml(text: str, file: str) -> dict[str, Any]:
    if not text:
        return {}
    import tomllib  # late: usually there is no file

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        line = re.search(r"at line (\d+)", str(problem))
        where = f"{file}:{line[1]}" if line else file
        raise BadConfig(f"{where}: the config is not TOML: {problem}.") from None
