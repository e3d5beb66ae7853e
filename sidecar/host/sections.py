"""Read one section of the config: its table in the file and its environment variables, checked against its type."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import Field, fields
from typing import Any, TypeVar

from sidecar.errors import BadConfig
from sidecar.host.text import SIZE_HINT, parse_size, suggest

PREFIX = "MEMORY_SIDECAR_"
TABLES = ("Tables", "Rules", "dict[")
"""How the types of options begin that are tables themselves. These have no environment variable."""

T = TypeVar("T")


def name_variable(section: str, key: str) -> str:
    """Return the environment variable that sets an option."""
    return f"{PREFIX}{section}_{key}".upper()


def list_settable(kind: type[Any]) -> list[Field[Any]]:
    """Return the options of a section that are single values."""
    return [entry for entry in fields(kind) if not str(entry.type).startswith(TABLES)]


def read_section(table: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Read a section as its type; environment variables take precedence over the file. Raise ``BadConfig``."""
    given = table.get(name, {})
    if not isinstance(given, dict):
        raise BadConfig(f"[{name}] must be a table.", at=(name,))
    if not given and not _has_variables(name):
        return kind()  # the usual case, and to list the fields of all sections takes longer than to read one
    check_known(given, kind.__dataclass_fields__, (name,))  # type: ignore[attr-defined]
    values = {key: check_value(value, (name, key)) for key, value in given.items()}
    for entry in list_settable(kind):
        value = read_variable(name_variable(name, entry.name), entry.type)
        values |= {} if value is None else {entry.name: value}
    return convert(values, kind, (name,))


def _has_variables(section: str) -> bool:
    beginning = name_variable(section, "")
    return any(name.startswith(beginning) for name in os.environ)


def list_given_keys(table: Mapping[str, Any], name: str, kind: type[Any]) -> set[str]:
    """Return the keys of a section that the file or the environment sets."""
    given = set(table.get(name, {}))
    if _has_variables(name):
        given |= {entry.name for entry in list_settable(kind) if os.environ.get(name_variable(name, entry.name))}
    return given


def convert(values: Mapping[str, Any], kind: type[T], at: tuple[str | int, ...]) -> T:
    """Convert values to a type. Raise ``BadConfig``, naming the option."""
    if not values:
        return kind()
    import msgspec  # late: most commands have no config

    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as problem:
        inner = re.search(r" - at `\$\.?([^`\[]*)", str(problem))
        key = (inner[1].split(".")[0],) if inner and inner[1] else ()
        said = str(problem).partition(" - at ")[0]
        raise BadConfig(f"{format_setting((*at, *key))} is not valid: {said}.", at=(*at, *key)) from None


def format_setting(at: tuple[str | int, ...]) -> str:
    """Format the location of a setting as a person would write it: [limits.layouts.notes] bytes."""
    *where, key = at
    if not where:
        return f"[{key}]"
    parts = [part if re.fullmatch(r"[A-Za-z0-9_-]+", str(part)) else f'"{part}"' for part in where]
    names = ".".join(str(part) for part in parts if not isinstance(part, int))
    return f"[{names}] {key}" if not isinstance(where[-1], int) else f"[[{names}]] {key}"


def check_known(table: Mapping[str, Any], known: Collection[str], at: tuple[str | int, ...]) -> None:
    """Raise ``BadConfig`` for an unknown key, with the nearest known one as a hint."""
    for key in table:
        if key not in known:
            where = f"{format_setting((*at, key)).rpartition(' ')[0]} has an" if at else "There is an"
            raise BadConfig(f"{where} unknown key {key!r}.", hint=suggest(key, known), at=(*at, key))


def check_value(value: Any, at: tuple[str | int, ...]) -> Any:
    """Return a value from the file, with sizes as numbers. Raise ``BadConfig`` for a negative or infinite number."""
    if isinstance(value, str) and str(at[-1]).endswith("bytes"):
        try:
            return parse_size(value)
        except ValueError:
            raise BadConfig(
                f"{format_setting(at)} is not valid: {value!r} is no size.", hint=SIZE_HINT, at=at
            ) from None
    if wrong := _find_amount_problem(value):
        raise BadConfig(f"{format_setting(at)} {wrong}.", at=at)
    return value


def _find_amount_problem(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    return "must not be negative" if isinstance(value, int | float) and value < 0 else ""


def check_least(settings: Any, section: str, least: Mapping[str, int]) -> None:
    """Raise ``BadConfig`` for a number that is too small for anything to work."""
    for key, amount in least.items():
        if getattr(settings, key) < amount:
            raise BadConfig(f"[{section}] {key} must be at least {amount}.", at=(section, key))


def check_cron(text: str, at: tuple[str | int, ...]) -> None:
    """Raise ``BadConfig`` for a text that is neither empty nor a cron expression."""
    if not text:
        return
    from sidecar.host.cron import CRON_HINT, Cron  # late: a command seldom has a schedule

    try:
        Cron.parse(text)
    except ValueError as problem:
        message = f"{format_setting(at)} = {text!r} is no cron expression: {problem}."
        raise BadConfig(message, hint=CRON_HINT, at=at) from None


def read_variable(name: str, kind: object) -> Any:
    """Return the value of an environment variable as the option's type; ``None`` if it is not set. Raise ``BadConfig``."""
    text = os.environ.get(name, "")
    if not text:
        return None
    if kind in (bool, "bool"):
        word = text.strip().lower()
        if word not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
            raise BadConfig(f"{name} must be true or false.")
        return word in ("true", "1", "yes", "on")
    if kind == "list[str]":
        return [word.strip() for word in text.split(",") if word.strip()]
    try:
        sized = kind == "int" and name.endswith("BYTES")
        value = parse_size(text) if sized else {"int": int, "float": float}.get(str(kind), str)(text)
    except ValueError:
        raise BadConfig(f"{name} must be a number.") from None
    if wrong := _find_amount_problem(value):
        raise BadConfig(f"{name} {wrong}.")
    return value
