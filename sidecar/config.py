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
from sidecar.layouts import Layout, built_in, custom
from sidecar.limits import Guards, Limits
from sidecar.service.settings import Service

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
    service: Service = Service()
    layouts: Mapping[str, Layout] = field(default_factory=built_in)


def default_store() -> str:
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return f"file:{data}/memory-sidecar"


def load_config(path: str | None, *, store: str | None = None) -> Config:
    """Read the config: ``path``, else ``MEMORY_SIDECAR_CONFIG``, else only defaults. A store given here wins.

    Raise ``BadConfig`` naming the key that is wrong and the nearest right one.
    """
    file = path or os.environ.get("MEMORY_SIDECAR_CONFIG") or ""
    table = _table(file) if file else {}
    _known(table, {entry.name for entry in fields(Config)}, file)
    wanted = store or os.environ.get("MEMORY_SIDECAR_STORE") or table.get("store") or default_store()
    if not isinstance(wanted, str):
        raise BadConfig(f"{file}: store must be a text.", hint='Write store = "file:/var/lib/memories".')
    direct = table.get("direct", False)
    if not isinstance(direct, bool):
        raise BadConfig(f"{file}: direct must be true or false.")
    return Config(
        store=wanted,
        direct=direct,
        limits=_section(table, "limits", Limits, file),
        guards=_section(table, "guards", Guards, file),
        timing=_section(table, "timing", Timing, file),
        service=_section(table, "service", Service, file),
        layouts={**built_in(), **custom(table.get("layouts", {}))},
    )


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


def _section(table: Mapping[str, Any], name: str, kind: type[T], file: str) -> T:
    section = table.get(name, {})
    if not isinstance(section, dict):
        raise BadConfig(f"{file}: [{name}] must be a table.")
    _known(section, set(kind.__dataclass_fields__), f"{file}: [{name}]")  # type: ignore[attr-defined]
    for key, value in section.items():
        if isinstance(value, int | float) and value < 0:
            raise BadConfig(f"{file}: [{name}] {key} must not be negative.")
    try:
        return msgspec.convert(section, kind, strict=True)
    except msgspec.ValidationError as problem:
        raise BadConfig(f"{file}: [{name}] is not valid: {problem}.") from None
