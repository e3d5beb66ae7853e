"""``token create``, ``token list`` and ``token revoke``: the named tokens of a service on this machine.

They change a file, which a running service reads again by itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sidecar.cli.result import Result, Table, format_size
from sidecar.config.settings import load_config
from sidecar.errors import UsageError
from sidecar.host.text import SIZE_HINT, parse_duration, parse_size, suggest
from sidecar.policy.validation import find_mistake
from sidecar.service.access.grants import ALL, ROLES, Verb, check_patterns
from sidecar.service.access.token_file import (
    TokenRecord,
    add_token,
    check_name,
    find_tokens_path,
    read_tokens,
    remove_token,
)

NO_HOME = "There is no home folder to keep the file of named tokens in."
ONCE = "It is shown this once; only a hash of it is kept, in {path}. A running service accepts it at once."
REVOKED = (
    "The token {name} is revoked; a running service refuses it at once. Sandboxes that were attached with it are looked after"
    " until they are detached: `memory-sidecar attachments` lists them."
)


def run_token(args: argparse.Namespace) -> Result:
    """Run ``token``."""
    path = find_tokens_path(load_config(args.config, store=args.store).service.tokens)
    if path is None:
        raise UsageError(NO_HOME, hint="Name one: [service] tokens, or MEMORY_SIDECAR_SERVICE_TOKENS.")
    if args.action == "list":
        return _list(path)
    if not args.name:
        raise UsageError(
            f"Which one? `token {args.action}` needs a name.", hint=f"memory-sidecar token {args.action} NAME"
        )
    return _create(path, args) if args.action == "create" else _revoke(path, args.name)


def _create(path: Path, args: argparse.Namespace) -> Result:
    memories = check_patterns(args.memories)
    for pattern in memories:
        if mistake := find_mistake(pattern):
            raise UsageError(f"{pattern!r} is no pattern: {mistake}.", hint="Such as --memories 'acme/*'.")
    verbs = _choose_verbs(args.role, args.verbs)
    if Verb.ADMIN in verbs and ALL not in memories:
        raise UsageError("The verb 'admin' is for every memory.", hint="Say --memories '*', or leave 'admin' out.")
    wanted = TokenRecord(
        id="",
        name=check_name(args.name),
        salt="",
        digest="",
        memories=memories,
        verbs=verbs,
        sandboxes=tuple(args.sandboxes or (ALL,)),
        created=time.time(),
        expires=_parse_end(args.expires) if args.expires else None,
        max_bytes=_parse_bytes(args.max_bytes) if args.max_bytes else 0,
        max_memories=_check_count("--max-memories", args.max_memories),
        calls_per_minute=_check_count("--calls-per-minute", args.calls_per_minute),
        concurrent=_check_count("--concurrent", args.concurrent),
    )
    token = add_token(path, wanted)
    return Result({"token": token, **_describe(wanted)}, [token, "", ONCE.format(path=path)])


def _list(path: Path) -> Result:
    records = sorted(read_tokens(path), key=lambda record: record.name)
    rows = [
        (
            record.name,
            " ".join(record.memories),
            _describe_verbs(record.verbs),
            _format_end(record),
            ", ".join(_list_quotas(record)) or "none",
        )
        for record in records
    ]
    table = Table(("NAME", "MEMORIES", "MAY", "UNTIL (UTC)", "QUOTAS"), rows, f"There are no named tokens in {path}.")
    return Result({"file": str(path), "tokens": [_describe(record) for record in records]}, [table])


def _revoke(path: Path, name: str) -> Result:
    if not remove_token(path, name):
        hint = suggest(name, [record.name for record in read_tokens(path)])
        raise UsageError(
            f"There is no token {name!r} in {path}.", hint=hint or "`memory-sidecar token list` shows those there are."
        )
    return Result({"revoked": name}, [REVOKED.format(name=name)])


def _choose_verbs(role: str | None, verbs: Sequence[str]) -> tuple[Verb, ...]:
    """Return the verbs of a role, or those named. Raise ``UsageError`` unless there is exactly one of both."""
    if bool(role) is bool(verbs):
        hint = f"--role {'|'.join(ROLES)}, or --verbs {','.join(Verb)} (some of them)."
        raise UsageError("Say what the token may do: a role, or verbs.", hint=hint)
    named = [word.strip() for text in verbs for word in text.split(",") if word.strip()]
    if unknown := [word for word in named if word not in list(Verb)]:
        raise UsageError(f"{unknown[0]!r} is no verb.", hint=suggest(unknown[0], Verb, listed=True))
    chosen = ROLES[role] if role else {Verb(word) for word in named}
    return tuple(verb for verb in Verb if verb in chosen)


def _parse_end(text: str) -> float:
    """Return the end of a token, from a duration or a date. Raise ``UsageError`` if it is neither, or over."""
    hint = "Write how long, such as 30d or 12h, or until when, such as 2027-01-31 or 2027-01-31T18:00Z."
    try:
        end = datetime.fromisoformat(text)
        moment = (end if end.tzinfo else end.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        try:
            moment = time.time() + parse_duration(text).total_seconds()
        except ValueError:
            raise UsageError(f"--expires: {text!r} is no end.", hint=hint) from None
    if moment <= time.time():
        raise UsageError(f"--expires: {text!r} is over already.", hint=hint)
    return moment


def _parse_bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise UsageError(f"--max-bytes: {text!r} is no size.", hint=SIZE_HINT) from None


def _check_count(option: str, count: int | None) -> int:
    if count is not None and count < 1:
        raise UsageError(f"{option} must be at least 1.", hint="Leave it out for no limit.")
    return count or 0


def _describe(record: TokenRecord) -> dict[str, Any]:
    """Return all of a token but its hash."""
    return {
        "name": record.name,
        "memories": list(record.memories),
        "verbs": [verb.value for verb in record.verbs],
        "sandboxes": list(record.sandboxes),
        "created": _format_time(record.created),
        "expires": _format_time(record.expires) if record.expires is not None else None,
        "expired": record.is_over,
        "max_bytes": record.max_bytes,
        "max_memories": record.max_memories,
        "calls_per_minute": record.calls_per_minute,
        "concurrent": record.concurrent,
    }


def _describe_verbs(verbs: Sequence[Verb]) -> str:
    role = next((name for name, granted in ROLES.items() if granted == frozenset(verbs)), "")
    return role or " ".join(verb.value for verb in verbs)


def _list_quotas(record: TokenRecord) -> list[str]:
    return [
        *([f"{format_size(record.max_bytes)} stored"] if record.max_bytes else []),
        *([f"{record.max_memories:,} memories"] if record.max_memories else []),
        *([f"{record.calls_per_minute:,} calls a minute"] if record.calls_per_minute else []),
        *([f"{record.concurrent:,} at once"] if record.concurrent else []),
        *([f"sandboxes {' '.join(record.sandboxes)}"] if ALL not in record.sandboxes else []),
    ]


def _format_end(record: TokenRecord) -> str:
    if record.expires is None:
        return "no end"
    end = datetime.fromtimestamp(record.expires, UTC)
    return f"{end:%Y-%m-%d %H:%M}" + (" (expired)" if record.is_over else "")


def _format_time(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")
