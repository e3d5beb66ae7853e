"""Validate limits, guards, privacy settings and retention before they are used.

A policy that could never work (a size of 0, a part larger than the whole, a table that matches no memory) is refused
when the config is read, with the setting to change, not at the first export.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sidecar.errors import BadConfig, BadMemoryId
from sidecar.format.patterns import compile_patterns, expand_braces
from sidecar.host.sections import check_cron, check_known, check_value, convert, format_setting, list_settable
from sidecar.host.text import parse_duration, suggest
from sidecar.ids import check_memory_id
from sidecar.layouts import Layout
from sidecar.layouts.custom import check_required
from sidecar.policy.limits import MODES, MOST_CONVERSATIONS, OF_FILES, OF_MEMORIES, REASONS, Guards, Limits, Tables
from sidecar.policy.privacy import MODES as PRIVACY_MODES
from sidecar.policy.privacy import Privacy
from sidecar.policy.retention import COUNTS, SAFE_PART, Retention, RetentionRules

At = tuple[str | int, ...]

_OF_ALL_TOGETHER = {"bytes", "files"}
_MODE_KEYS = {f"{key}_over" for key in OF_MEMORIES} | {"over"}
_LIMITS_OF_LAYOUTS = {*OF_FILES, *(f"{key}_over" for key in OF_FILES), "over"}
_GUARDS_OF_LAYOUTS = {"shrink_to", "shrink_from_bytes", "shrink_from_files", "required"}
_OTHER = "\ue000"
"""A letter that no pattern contains."""
_MANY = 9


def check_limits(limits: Limits, given: Collection[str], layouts: Collection[str]) -> Limits:
    """Return the limits to use; ``given`` are the keys that were set. Raise ``BadConfig``."""
    limits = replace(limits, layouts=_list_tables(limits.layouts), memories=_list_tables(limits.memories))
    _check_names(limits.layouts, layouts, ("limits", "layouts"))
    check_reachable(limits.memories, ("limits", "memories"))
    keys = {entry.name for entry in list_settable(Limits)}
    memories, parts = {}, {}
    for pattern, table in limits.memories.items():
        memories[pattern], narrowed = _narrow_table(limits, table, keys, ("limits", "memories", pattern))
        _check_whole(narrowed, table, ("limits", "memories", pattern))
    largest = max([0, *(table.get("bytes", 0) for table in memories.values())])
    _check_whole(limits, given, ("limits",), largest)
    for name, table in limits.layouts.items():
        at: At = ("limits", "layouts", name)
        if of_all := sorted(set(table) & keys - _LIMITS_OF_LAYOUTS):
            raise BadConfig(
                f"{format_setting((*at, of_all[0]))} is of a whole memory, not of a layout.",
                hint="Set it in [limits] or [limits.memories].",
                at=(*at, of_all[0]),
            )
        parts[name], narrowed = _narrow_table(limits, table, _LIMITS_OF_LAYOUTS, at)
        _check_whole(replace(narrowed, memory_bytes=0, store_bytes=0), table, at, largest)
        for key in _OF_ALL_TOGETHER & set(table):
            most = max([getattr(limits, key), *(one.get(key, 0) for one in memories.values())])
            if parts[name][key] > most:
                raise _build_contradiction_error((*at, key), parts[name][key], ("limits", key), most)
    return replace(limits, layouts=parts, memories=memories)


def check_guards(guards: Guards, layouts: Mapping[str, Layout]) -> Guards:
    """Return the guards to use. Raise ``BadConfig``."""
    _check_guard(guards, ("guards",))
    _check_names(_list_tables(guards.layouts), layouts, ("guards", "layouts"))
    check_reachable(_list_tables(guards.memories), ("guards", "memories"))
    keys = {entry.name for entry in list_settable(Guards)}
    parts, memories = {}, {}
    for pattern, table in _list_tables(guards.memories).items():
        at: At = ("guards", "memories", pattern)
        memories[pattern], narrowed = _narrow_table(guards, table, keys, at)
        _check_guard(narrowed, at)
    for name, table in _list_tables(guards.layouts).items():
        at = ("guards", "layouts", name)
        check_known(table, _GUARDS_OF_LAYOUTS, at)
        required = table.get("required", [])
        if not isinstance(required, list) or not all(isinstance(path, str) and path for path in required):
            raise BadConfig(f"{format_setting((*at, 'required'))} must be a list of paths.", at=(*at, "required"))
        check_required(layouts[name], required, (*at, "required"))
        plain = {key: value for key, value in table.items() if key != "required"}
        parts[name], narrowed = _narrow_table(guards, plain, _GUARDS_OF_LAYOUTS, at)
        _check_guard(narrowed, at)
        parts[name] |= {"required": required} if "required" in table else {}
    return replace(guards, layouts=parts, memories=memories)


def check_privacy(privacy: Privacy, layouts: Collection[str]) -> Privacy:
    """Return the privacy settings to use. Raise ``BadConfig``."""
    _check_modes(privacy, ("privacy",))
    _check_names(_list_tables(privacy.layouts), layouts, ("privacy", "layouts"))
    check_reachable(_list_tables(privacy.memories), ("privacy", "memories"))
    narrower: dict[str, Any] = {"layouts": {}, "memories": {}}
    for kind, tables in (("layouts", privacy.layouts), ("memories", privacy.memories)):
        for name, table in _list_tables(tables).items():
            narrower[kind][name], narrowed = _narrow_table(privacy, table, PRIVACY_MODES, ("privacy", kind, name))
            _check_modes(narrowed, ("privacy", kind, name))
    if privacy.rules:
        from sidecar.policy.rules import check_rules  # late: what can take long is found by taking patterns apart

        privacy = replace(privacy, rules=check_rules(privacy.rules))
    return replace(privacy, **narrower)


def _check_modes(privacy: Privacy, at: At) -> None:
    """Raise ``BadConfig`` for a mode that does not exist."""
    for key, modes in PRIVACY_MODES.items():
        mode = getattr(privacy, key)
        if mode not in modes and (mode or key != "databases"):
            may_be = " or ".join(f'"{one}"' for one in modes)
            raise BadConfig(
                f"{format_setting((*at, key))} must be {may_be}, not {mode!r}.",
                hint=suggest(mode, modes),
                at=(*at, key),
            )


def check_retention(retention: Retention, given: dict[str, set[str]], command_seconds: float) -> None:
    """Raise ``BadConfig`` for settings that cannot be meant, naming the key and what to write.

    ``given``: the keys that were set, for ``""`` (all memories) and for each pattern.
    """
    check_reachable(retention.memories, ("retention", "memories"))
    for pattern, rules in [("", retention), *retention.memories.items()]:
        section = f'[retention.memories."{pattern}"]' if pattern else "[retention]"
        at = ("retention", "memories", pattern) if pattern else ("retention",)
        for key, message, hint in _find_retention_problems(rules, given.get(pattern, set()), retention.store_bytes):
            raise BadConfig(f"{section} {message}", hint=hint, at=(*at, key))
    least = command_seconds / SAFE_PART
    if retention.grace_seconds < least:
        raise BadConfig(
            f"[retention] grace = {retention.grace!r} is shorter than what an export may take.",
            hint=f'Write grace = "{least:.0f}s" or more (twice [timing] command), or lower [timing] command.',
            at=("retention", "grace"),
        )
    if parse_duration(retention.every) < timedelta(seconds=1):
        raise BadConfig(
            "[retention] every must be at least a second.", hint='Write every = "1h".', at=("retention", "every")
        )
    check_cron(retention.at, ("retention", "at"))


def _find_retention_problems(
    rules: RetentionRules, given: set[str], store_bytes: int
) -> Iterator[tuple[str, str, str]]:
    """Yield the key, the problem, and what to write instead."""
    for key in ("keep_within", "grace", "every", "keep_calls"):
        text = getattr(rules, key, "")
        if text or key in given:
            try:
                if not parse_duration(text):
                    yield key, f"{key} = {text!r} is no time at all.", 'Write more, such as "12h" or "30d".'
            except ValueError as problem:
                yield key, f"{key} = {text!r} is no duration.", f"{str(problem)[:1].upper()}{str(problem)[1:]}."
    if (zeros := [key for key in COUNTS if key in given]) and not rules.policy().rules:
        key = zeros[0]
        yield (
            key,
            f"{key} = 0 and nothing else keeps no snapshot but the head.",
            f"Write {key} = 1 or more; or leave it out, and all are kept.",
        )
    if store_bytes and rules.memory_bytes > store_bytes:
        yield (
            "memory_bytes",
            f"memory_bytes = {rules.memory_bytes} is more than store_bytes = {store_bytes}: it could never be reached.",
            "Lower memory_bytes, or raise store_bytes in [retention].",
        )
    if any(not pattern for pattern in rules.keep_labelled):
        said = "keep_labelled has an empty pattern, which no label matches."
        yield "keep_labelled", said, 'Write keep_labelled = ["release-*"].'


def apply_required(layouts: Mapping[str, Layout], guards: Guards) -> dict[str, Layout]:
    """Return the layouts with the required paths that the guards set."""
    given = {name: table["required"] for name, table in guards.layouts.items() if "required" in table}
    return {
        name: replace(layout, required=tuple(given[name])) if name in given else layout
        for name, layout in layouts.items()
    }


def _check_whole(limits: Limits, given: Collection[str], at: At, largest: int = 0) -> None:
    """Check limits for values that could never work. ``largest``: the most bytes that any memory with limits of its own
    may have. Raise ``BadConfig``."""
    for key in (*OF_FILES, "packed_bytes"):
        if getattr(limits, key) < 1:
            raise BadConfig(
                f"{format_setting((*at, key))} is 0, so that nothing could ever be exported.", at=(*at, key)
            )
    for key in sorted(_MODE_KEYS):
        mode = getattr(limits, key)
        if mode not in MODES and (mode or key == "over"):
            raise BadConfig(
                f'{format_setting((*at, key))} must be "reject" or "trim", not {mode!r}.',
                hint=suggest(mode, MODES),
                at=(*at, key),
            )
    if not 0 < limits.warn_at <= 1:
        raise BadConfig(f"{format_setting((*at, 'warn_at'))} must be more than 0 and at most 1.", at=(*at, "warn_at"))
    for part, whole in (("file_bytes", "bytes"), ("packed_bytes", "memory_bytes"), ("memory_bytes", "store_bytes")):
        least, most = getattr(limits, part), getattr(limits, whole)
        if part in given and 0 < most < least and not (whole == "bytes" and least <= largest):
            raise _build_contradiction_error((*at, part), least, (*at, whole), most)


def _build_contradiction_error(part: At, least: int, whole: At, most: int) -> BadConfig:
    return BadConfig(
        f"{format_setting(part)} is {least}, more than {format_setting(whole)}, which is {most}: it could never be reached.",
        hint="Lower the first or raise the second.",
        at=part,
    )


def _check_guard(guards: Guards, at: At) -> None:
    """Raise ``BadConfig`` for a guard setting out of range."""
    if not 0 <= guards.shrink_to <= 1:
        raise BadConfig(
            f"{format_setting((*at, 'shrink_to'))} is a share: from 0 (never object) to 1.", at=(*at, "shrink_to")
        )
    for reason in guards.allow:
        if reason not in REASONS:
            raise BadConfig(
                f"{format_setting((*at, 'allow'))} names an unknown reason {reason!r}.",
                hint=suggest(reason, REASONS, listed=True),
                at=(*at, "allow"),
            )

    if guards.accept_after_conversations == 1 or guards.accept_after_conversations > MOST_CONVERSATIONS:
        raise BadConfig(
            f"{format_setting((*at, 'accept_after_conversations'))} must be 0 (never), or from 2 to {MOST_CONVERSATIONS}.",
            hint="To switch a guard off, use allow.",
            at=(*at, "accept_after_conversations"),
        )
    try:
        _ = guards.accept_after_seconds
    except ValueError as problem:
        raise BadConfig(
            f"{format_setting((*at, 'accept_after'))} = {guards.accept_after!r} is no duration.",
            hint=f'{str(problem)[:1].upper()}{str(problem)[1:]}; "" is never.',
            at=(*at, "accept_after"),
        ) from None


def _list_tables(tables: Tables) -> dict[str, dict[str, Any]]:
    """Return the tables as plain dicts."""
    return {name: dict(table) for name, table in tables.items()}


def _narrow_table(whole: Any, table: Mapping[str, Any], known: Collection[str], at: At) -> tuple[dict[str, Any], Any]:
    """Return a narrower table, and the whole with the table applied. Raise ``BadConfig``."""
    check_known(table, known, at)
    values = {key: check_value(value, (*at, key)) for key, value in table.items()}
    checked = convert(values, type(whole), at)  # checks the types only
    values = {key: getattr(checked, key) for key in values}
    return values, replace(whole, **values)


def _check_names(tables: Tables, known: Collection[str], at: At) -> None:
    """Raise ``BadConfig`` for a table that names an unknown layout."""
    for name in tables:
        if name not in known:
            hint = suggest(name, known, listed=True)
            raise BadConfig(f"[{at[0]}.{at[1]}] names an unknown layout {name!r}.", hint=hint, at=(*at, name))


def find_mistake(pattern: str) -> str:
    """Return what in a pattern of memory ids looks like more than it is; empty if nothing does.

    Such characters stand for themselves, so whoever takes them for a part of the syntax would match nothing without a word.
    """
    if "[" in pattern or "]" in pattern:
        return "a pattern has no [classes]; * and ? stand for any characters within one part, {a,b} for either"
    if any("{" in full or "}" in full for full in expand_braces(pattern)):
        return "its braces are not paired: {a,b} stands for either"
    return ""


def check_reachable(patterns: Iterable[str], at: tuple[str, ...]) -> None:
    """Raise ``BadConfig`` unless each pattern matches some memory that none before it matches."""
    before: list[str] = []
    for pattern in patterns:
        if mistake := find_mistake(pattern):
            hint = "A ? stands for any one character, so also for one of these in an id."
            raise BadConfig(f"[{'.'.join(at)}] {pattern!r} is no pattern: {mistake}.", hint=hint, at=(*at, pattern))
        ids = [*filter(_is_possible_id, _make_examples(pattern))]
        if all(map(compile_patterns(before).match, ids)):
            takers = [repr(earlier) for earlier in before if any(map(compile_patterns([earlier]).match, ids))]
            why = f"every memory it fits is taken by {' or '.join(takers)} before it" if ids else "it fits no memory"
            hint = "The first pattern that fits counts: write the narrower one first." if ids else ""
            raise BadConfig(f"[{'.'.join(at)}] {pattern!r} is never reached: {why}.", hint=hint, at=(*at, pattern))
        before.append(pattern)


def _is_possible_id(id: str) -> bool:
    """Return whether a memory may have this id."""
    try:
        check_memory_id(id)
    except BadMemoryId:
        return False
    return True


def _make_examples(pattern: str) -> Iterator[str]:
    """Yield ids that a pattern matches, with nothing, little and much for each wildcard."""
    for full in expand_braces(pattern):
        parts = (full + "**" if full.endswith("/") else full).removeprefix("/").split("/")
        for width in (0, 1, _MANY):
            for depth in (0, 1, 2, _MANY):
                id: list[str] = []
                for part in parts:
                    one = part.replace("*", _OTHER * width).replace("?", _OTHER)
                    id += [_OTHER] * depth if part == "**" else [one]
                if id and all(id):
                    yield "/".join(id)
