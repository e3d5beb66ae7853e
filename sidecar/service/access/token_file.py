"""The file with the named tokens: what each may do, and a salted hash of each, never the token itself.

    {"format": 1, "tokens": [{"id": "…", "name": "acme", "salt": "…", "digest": "…", "memories": ["acme/*"], …}]}

A token is ``ms_ID_SECRET``: 256 random bits after an id that is no secret, by which its line is found. Such a secret
cannot be guessed, so a fast hash is enough. Commands replace the file as a whole, under a lock; a running service looks
at its status before each use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sidecar.errors import BadConfig, UsageError
from sidecar.host.files import open_private
from sidecar.host.local_token import TokenNotKept, find_token_path
from sidecar.host.values import dataclass
from sidecar.service.access.grants import RESERVED, Caller, Quotas, Verb, check_patterns

PREFIX = "ms_"
FORMAT = 1
LARGEST = 16 << 20
OTHERS_MAY_WRITE = 0o022
PLACE = ("service", "tokens")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")
_TOKEN = re.compile(rf"{PREFIX}([0-9a-f]{{12}})_([A-Za-z0-9_-]{{43}})\Z")


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named token as it is in the file. Unknown fields are refused: a later version may restrict a token by one."""

    id: str
    name: str
    salt: str
    digest: str
    memories: tuple[str, ...]
    verbs: tuple[Verb, ...]
    sandboxes: tuple[str, ...] = ("*",)
    created: float = 0.0
    expires: float | None = None
    max_bytes: int = 0
    max_memories: int = 0
    calls_per_minute: int = 0
    concurrent: int = 0

    def build_caller(self) -> Caller:
        """Return who calls with this token."""
        return Caller(
            name=self.name,
            id=self.id,
            memories=check_patterns(self.memories),
            verbs=frozenset(self.verbs),
            sandboxes=self.sandboxes,
            quotas=Quotas(
                bytes=self.max_bytes,
                memories=self.max_memories,
                calls_per_minute=self.calls_per_minute,
                concurrent=self.concurrent,
            ),
            expires=self.expires,
        )

    @property
    def is_over(self) -> bool:
        return self.expires is not None and self.expires <= time.time()

    def accepts(self, token: str) -> bool:
        """Whether this is the token, compared in constant time."""
        return hmac.compare_digest(_compute_digest(self.salt, token), self.digest)


class _Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    tokens: list[TokenRecord]


@dataclass(frozen=True, slots=True)
class FileStatus:
    """By what a file that was replaced is recognised."""

    inode: int
    modified: int
    changed: int
    size: int


def find_tokens_path(setting: str) -> Path | None:
    """Return the path of the file: as ``[service] tokens`` says, else beside the token that is kept for this user.
    ``None`` if that user has no home."""
    if setting:
        return Path(setting).expanduser()
    try:
        return find_token_path().with_name("tokens.json")
    except TokenNotKept:
        return None


def parse_token(token: str) -> str:
    """Return the id in a named token; empty if it does not have the form of one."""
    found = _TOKEN.match(token)
    return found[1] if found else ""


def read_status(path: Path) -> FileStatus | None:
    """Return the status of the file; ``None`` if there is none. Raise ``OSError``."""
    try:
        seen = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return FileStatus(seen.st_ino, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size)


def read_tokens(path: Path) -> list[TokenRecord]:
    """Return the tokens in the file; none if there is no file. Raise ``BadConfig`` if it is damaged, or others may
    write to it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as problem:
        raise _build_error(path, f"cannot be read: {problem.strerror}") from None
    with open(file, "rb") as opened:
        seen = os.fstat(file)
        if not stat.S_ISREG(seen.st_mode) or seen.st_size > LARGEST:
            raise _build_error(path, "is not a file of tokens")
        # Whoever can write to it can give themselves every right.
        if seen.st_uid not in (0, os.geteuid()) or seen.st_mode & OTHERS_MAY_WRITE:
            raise _build_error(path, f"can be changed by others (mode {stat.S_IMODE(seen.st_mode):04o})")
        data = opened.read()
    try:
        contents = msgspec.json.decode(data, type=_Contents)
        if contents.format != FORMAT:
            raise _build_error(path, "was written by a later version")
        _check_records(contents.tokens)
    except (msgspec.DecodeError, msgspec.ValidationError, UsageError) as problem:
        if isinstance(problem, BadConfig):
            raise
        raise _build_error(path, f"is damaged: {problem}") from None
    return contents.tokens


def _check_records(records: list[TokenRecord]) -> None:
    """Raise ``UsageError`` if two have the same name or id, or one is not valid."""
    for key in ("name", "id"):
        if len({getattr(record, key) for record in records}) < len(records):
            raise UsageError(f"Two tokens have the same {key}.")
    for record in records:
        check_name(record.name)
        record.build_caller()
        limits = (record.max_bytes, record.max_memories, record.calls_per_minute, record.concurrent)
        if not record.verbs or any(limit < 0 for limit in limits):
            raise UsageError(f"The token {record.name} has no verbs, or a quota below 0.")


def check_name(name: str) -> str:
    """Return the name of a token. Raise ``UsageError`` if it is not one."""
    if not _NAME.match(name) or name in RESERVED:
        hint = f"Use up to 63 lower-case letters, digits, '.', '_' and '-'; not {', '.join(sorted(RESERVED))}."
        raise UsageError(f"{name!r} is no name for a token.", hint=hint)
    return name


def add_token(path: Path, wanted: TokenRecord) -> str:
    """Add a token to the file and return it: it cannot be read again. ``id``, ``salt`` and ``digest`` of ``wanted`` are
    replaced. Raise ``UsageError`` if there is one of that name, and ``BadConfig``."""
    id, secret, salt = secrets.token_hex(6), secrets.token_urlsafe(32), secrets.token_hex(16)
    token = f"{PREFIX}{id}_{secret}"
    with _open_locked(path):
        records = read_tokens(path)
        if any(record.name == wanted.name for record in records):
            raise UsageError(
                f"There is a token {wanted.name!r} already.",
                hint=f"Choose another name, or revoke it first: memory-sidecar token revoke {wanted.name}",
            )
        made = msgspec.structs.replace(wanted, id=id, salt=salt, digest=_compute_digest(salt, token))
        _check_records([*records, made])
        _write(path, [*records, made])
    return token


def remove_token(path: Path, name: str) -> bool:
    """Remove a token from the file. Return whether there was one of that name. Raise ``BadConfig``."""
    with _open_locked(path):
        records = read_tokens(path)
        left = [record for record in records if record.name != name]
        if len(left) < len(records):
            _write(path, left)
    return len(left) < len(records)


def _compute_digest(salt: str, token: str) -> str:
    return hashlib.sha256(f"{salt}:{token}".encode()).hexdigest()


@contextlib.contextmanager
def _open_locked(path: Path) -> Iterator[None]:
    """Keep other commands from changing the file. The lock is a file of its own, because the file itself is replaced."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path.with_name(f"{path.name}.lock"), "ab", opener=open_private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as problem:
        raise _build_error(path, f"cannot be written: {problem.strerror}") from None


def _write(path: Path, records: list[TokenRecord]) -> None:
    """Replace the file: it is complete at any time, and only its owner can read it."""
    text = json.dumps({"format": FORMAT, "tokens": [msgspec.to_builtins(record) for record in records]}, indent=1)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(draft, "x", encoding="utf-8", opener=open_private) as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _build_error(path: Path, why: str) -> BadConfig:
    hint = "Put it right, or remove it and make the tokens again: memory-sidecar token create."
    return BadConfig(f"The file of named tokens {path} {why}.", hint=hint, at=PLACE)
