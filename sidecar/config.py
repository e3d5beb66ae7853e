"""Settings: a TOML file, a few environment variables, and defaults that work with nothing but Python."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sidecar.engine.parts import Timing
from sidecar.errors import BadConfig
from sidecar.layouts import Layout, built_in
from sidecar.layouts.custom import custom
from sidecar.limits import Guards, Limits
from sidecar.retention.settings import Retention, Rules
from sidecar.retention.settings import check as check_retention
from sidecar.service.settings import Service, Webhook

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a user can set. A file may hold these keys and no others."""

    store: str = ""
    direct: bool = False
    """Let packs go straight between sandbox and bucket (``s3:`` stores)."""
    limits: Limits = Limits()
    guards: Guards = Guards()
    timing: Timing = Timing()
    retention: Retention = Retention()
    service: Service = Service()
    webhooks: list[Webhook] = field(default_factory=list)
    layouts: Mapping[str, Layout] = field(default_factory=built_in)


def default_store() -> str:
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return f"file:{data}/memory-sidecar"


SECTIONS: dict[str, type[Any]] = {
    "limits": Limits,
    "guards": Guards,
    "timing": Timing,
    "retention": Retention,
    "service": Service,
}
PREFIX = "MEMORY_SIDECAR_"
OTHERS = {"STORE", "CONFIG", "TOKEN", "URL", "DIRECT"}
"""What else may follow the prefix, beside SECTION_KEY."""


def load_config(path: str | None, *, store: str | None = None) -> Config:
    """Read the config: ``path``, else ``MEMORY_SIDECAR_CONFIG``, else only defaults; then ``MEMORY_SIDECAR_SECTION_KEY`` of
    the environment, which wins; and a store given here wins over all.

    Raise ``BadConfig`` naming the key that is wrong and the nearest right one.
    """
    file = path or os.environ.get("MEMORY_SIDECAR_CONFIG") or ""
    table = _table(file) if file else {}
    _known(table, {entry.name for entry in fields(Config)}, file)
    wanted = store or os.environ.get("MEMORY_SIDECAR_STORE") or table.get("store") or default_store()
    if not isinstance(wanted, str):
        raise BadConfig(f"{file}: store must be a text.", hint='Write store = "file:/var/lib/memories".')
    direct = _from_text("MEMORY_SIDECAR_DIRECT", bool, table.get("direct", False))
    if not isinstance(direct, bool):
        raise BadConfig(f"{file}: direct must be true or false.")
    timing = _section(table, "timing", Timing, file)
    return Config(
        store=wanted,
        direct=direct,
        limits=_section(table, "limits", Limits, file),
        guards=_section(table, "guards", Guards, file),
        timing=timing,
        retention=_retention(table, timing, file),
        service=_section(table, "service", Service, file),
        webhooks=_webhooks(table.get("webhooks", []), file),
        layouts={**built_in(), **custom(table.get("layouts", {}))},
    )


def variable(section: str, key: str) -> str:
    """The environment variable that sets an option."""
    return f"{PREFIX}{section}_{key}".upper()


def unknown_variables() -> dict[str, str]:
    """Variables that look like ours and are not, each with the nearest that is."""
    known = {variable(section, name) for section, kind in SECTIONS.items() for name in _in_environment(kind)}
    known |= {PREFIX + name for name in OTHERS}
    found = [name for name in os.environ if name.startswith(PREFIX) and name not in known]
    return {name: next(iter(difflib.get_close_matches(name, known, 1)), "") for name in sorted(found)}


def _in_environment(kind: type[Any]) -> list[str]:
    """The options of a section that a variable can hold: all but tables."""
    return [entry.name for entry in fields(kind) if not str(entry.type).startswith("dict[")]


def _from_text(name: str, kind: object, otherwise: Any) -> Any:
    """The value of a variable, as what the option is; what it is otherwise when the variable is not set."""
    text = os.environ.get(name, "")
    if not text:
        return otherwise
    if kind in (bool, "bool"):
        word = text.strip().lower()
        if word not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
            raise BadConfig(f"{name} must be true or false.")
        return word in ("true", "1", "yes", "on")
    if str(kind).startswith("list["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return {"int": int, "float": float}.get(str(kind), str)(text)
    except ValueError:
        raise BadConfig(f"{name} must be a number.") from None


def _webhooks(rows: Any, file: str) -> list[Webhook]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadConfig(f"{file}: webhooks must be written as [[webhooks]].")
    hooks = []
    for row in rows:
        _known(row, {entry.name for entry in fields(Webhook)}, f"{file}: [[webhooks]]")
        try:
            hook = msgspec.convert(row, Webhook, strict=True)
        except msgspec.ValidationError as problem:
            raise BadConfig(f"{file}: [[webhooks]] is not valid: {problem}.") from None
        if not hook.url.startswith(("http://", "https://")):
            raise BadConfig(f"{file}: a webhook's url must begin with http:// or https://.")
        if hook.secret_env and not os.environ.get(hook.secret_env):
            raise BadConfig(f"{file}: {hook.secret_env}, which is to sign a webhook's calls, is not set.")
        hooks.append(hook)
    return hooks


def _table(file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text("utf-8"))
    except OSError as problem:
        raise BadConfig(f"The config {file} cannot be read: {problem.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise BadConfig(f"The config {file} is not TOML: {problem}.") from None


def _known(table: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise BadConfig(f"{where} has an unknown key {key!r}.", hint=f"Did you mean {near[0]!r}?" if near else "")


def _retention(table: Mapping[str, Any], timing: Timing, file: str) -> Retention:
    section = table.get("retention", {})
    special = section.get("memories", {}) if isinstance(section, dict) else {}
    if not isinstance(special, dict) or not all(isinstance(rules, dict) for rules in special.values()):
        raise BadConfig(f'{file}: [retention] memories must be written as [retention.memories."PATTERN"].')
    for pattern, rules in special.items():
        where = f'{file}: [retention.memories."{pattern}"]'
        _known(rules, set(Rules.__dataclass_fields__), where)
        _not_negative(rules, where)
    retention = _section(table, "retention", Retention, file)
    given = {"": set(section) | {name for name in _in_environment(Retention) if _is_set("retention", name)}}
    given |= {pattern: set(rules) for pattern, rules in special.items()}
    check_retention(retention, given, timing.command, f"{file}: " if file else "")
    return retention


def _is_set(section: str, key: str) -> bool:
    return bool(os.environ.get(variable(section, key)))


def _not_negative(section: Mapping[str, Any], where: str) -> None:
    for key, value in section.items():
        if isinstance(value, int | float) and value < 0:
            raise BadConfig(f"{where} {key} must not be negative.")


def _section(table: Mapping[str, Any], name: str, kind: type[T], file: str) -> T:
    section = table.get(name, {})
    if not isinstance(section, dict):
        raise BadConfig(f"{file}: [{name}] must be a table.")
    _known(section, set(kind.__dataclass_fields__), f"{file}: [{name}]")  # type: ignore[attr-defined]
    for entry in fields(kind):  # type: ignore[arg-type]
        if entry.name not in _in_environment(kind):
            continue
        value = _from_text(variable(name, entry.name), entry.type, section.get(entry.name))
        section = section if value is None else {**section, entry.name: value}
    _not_negative(section, f"{file}: [{name}]")
    try:
        return msgspec.convert(section, kind, strict=True)
    except msgspec.ValidationError as problem:
        raise BadConfig(f"{file}: [{name}] is not valid: {problem}.") from None
