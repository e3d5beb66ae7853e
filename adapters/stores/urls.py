"""Store URLs: what people write after ``--store``, and the store each one opens.

    file:/var/lib/memories   file:relative   file:~/memories     a folder; [?shared=group] for all users of a group
    volume:/data[?prefix=memories&shared=group]                  a folder on a volume that must be mounted at /data
    s3://bucket[/prefix][?endpoint=…&region=…&…]                 a prefix of a bucket

A URL never contains credentials, and no message repeats one whole: someone may have put a secret into it anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from sidecar.errors import BadReference
from sidecar.host.text import find_nearest
from sidecar.ports import Store

if TYPE_CHECKING:
    from adapters.stores.disk_files import FileModes
    from adapters.stores.s3 import S3Config

_OPTIONS = {
    "file": ("shared",),
    "volume": ("prefix", "shared"),
    "s3": (
        *("endpoint", "sandbox-endpoint", "region", "path-style", "sse", "sse-kms-key-id"),
        *("single-writer", "profile"),
    ),
}
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def open_store(url: str) -> Store:
    """Return the store that ``url`` names, without touching it. Raise ``BadReference`` if the URL is not valid."""
    scheme, colon, _ = url.partition(":")
    if not colon or url.startswith(("/", ".", "~")):
        raise BadReference("A store is written as a URL, not as a plain path.", hint=f"Write file:{url or '/path'}")
    if scheme not in _OPTIONS:
        raise BadReference(f"There is no '{scheme}:' store.", hint=_suggest_nearest(scheme, _OPTIONS, "{}:"))
    if any(ord(character) < 32 or character == "\x7f" for character in url):
        raise BadReference("The store URL holds a line break, tab or other control character.")
    parts = _split_url(url)
    options = _parse_options(scheme, parts.query)
    # Each adapter is imported only when needed: a command on a local disk need not wait for S3's.
    if scheme == "s3":
        from adapters.stores.s3 import S3Store

        return S3Store(_build_s3_config(parts, options), url=url)
    from adapters.stores.disk import DiskStore

    path, modes = _parse_path(scheme, parts), _choose_modes(options.get("shared"))
    if scheme == "file":
        return DiskStore(path, url=url, modes=modes)
    return DiskStore(path, url=url, mount_required=True, prefix=_parse_prefix(options.get("prefix", "")), modes=modes)


def find_folder(url: str) -> Path | None:
    """Return the folder of a ``file:`` or ``volume:`` store; ``None`` for others. Raise ``BadReference``."""
    scheme = url.partition(":")[0]
    if scheme not in ("file", "volume"):
        return None
    parts = _split_url(url)
    return _parse_path(scheme, parts) / _parse_prefix(_parse_options(scheme, parts.query).get("prefix", ""))


def _split_url(url: str) -> SplitResult:
    """Split a URL. Raise ``BadReference`` if it contains credentials or cannot be parsed."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise BadReference("The store URL cannot be read.", hint="Look for a stray '[' or ']'.") from None
    if "@" in parts.netloc:
        raise BadReference(
            "The store URL holds credentials.", hint="Leave them out; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    if "#" in url:
        raise BadReference(
            "The store URL holds a '#', which would end it there.", hint="Write %23 for a '#' in a name."
        )
    return parts


def _parse_options(scheme: str, query: str) -> dict[str, str]:
    """Parse the options after ``?``. Raise ``BadReference`` for one that is unknown, repeated or empty."""
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in _OPTIONS[scheme]:
            raise BadReference(
                f"A {scheme}: store has no option '{name}'.", hint=_suggest_nearest(name, _OPTIONS[scheme], "{}")
            )
        if name in options:
            raise BadReference(f"The option '{name}' is given twice.")
        if not value:
            raise BadReference(f"The option '{name}' has no value.")
        options[name] = value
    return options


def _parse_path(scheme: str, parts: SplitResult) -> Path:
    """Return the folder that a URL names. Raise ``BadReference``."""
    if parts.netloc not in ("", "localhost"):
        raise BadReference(
            f"'{parts.netloc}' stands where a {scheme}: URL has a host.",
            hint=f"Write {scheme}:/{parts.netloc}{parts.path} for a path on this machine.",
        )
    try:
        path = Path(_decode_path(parts.path)).expanduser().absolute()
    except RuntimeError:
        raise BadReference("'~' stands for no known home.", hint="Write the whole path.") from None
    if not parts.path or path == Path("/"):
        raise BadReference(f"The {scheme}: URL names no folder.", hint=f"Write {scheme}:/path/to/folder")
    if scheme == "volume" and not parts.path.startswith("/"):
        raise BadReference("A volume: URL takes the absolute path of the mount.", hint=f"Write volume:/{parts.path}")
    return path


def _choose_modes(shared: str | None) -> FileModes:
    from adapters.stores.disk_files import PRIVATE, SHARED

    if shared not in (None, "group"):
        raise BadReference(f"A store cannot be shared by '{shared}'.", hint="Write shared=group, or leave it out.")
    return SHARED if shared else PRIVATE


def _build_s3_config(parts: SplitResult, options: Mapping[str, str]) -> S3Config:
    if not parts.netloc:
        raise BadReference("The s3: URL names no bucket.", hint="Write s3://bucket/prefix")
    if not _BUCKET.fullmatch(parts.netloc):
        raise BadReference(
            f"'{parts.netloc}' is no bucket name.", hint="A server's address goes into ?endpoint=http://host:port"
        )
    sse, kms_key = options.get("sse"), options.get("sse-kms-key-id")
    if kms_key and sse == "AES256":
        raise BadReference("The option 'sse-kms-key-id' needs sse=aws:kms.")
    prefix = _parse_prefix(_decode_path(parts.path))
    from adapters.stores.s3 import S3Config

    return S3Config(
        bucket=parts.netloc,
        prefix=f"{prefix}/" if prefix else "",
        endpoint=_parse_endpoint(options, "endpoint"),
        sandbox_endpoint=_parse_endpoint(options, "sandbox-endpoint"),
        region=options.get("region"),
        path_style=_parse_flag(options, "path-style"),
        sse=_parse_sse(sse or ("aws:kms" if kms_key else None)),
        sse_kms_key_id=kms_key,
        single_writer=_parse_flag(options, "single-writer") or False,
        profile=options.get("profile"),
    )


def _parse_prefix(text: str) -> str:
    """Return a prefix without surrounding slashes. Raise ``BadReference`` if a part is empty, '.' or '..'."""
    prefix = text.strip("/")
    if prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
        raise BadReference(f"'{prefix}' is no usable prefix.", hint="No part of it may be empty, '.' or '..'.")
    return prefix


def _parse_endpoint(options: Mapping[str, str], name: str) -> str | None:
    """Return an option that is a server's address. Raise ``BadReference`` if it is not valid."""
    text = options.get(name)
    if text is None:
        return None
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or " " in text:
        raise BadReference(f"The option '{name}' is no address of a server.", hint=f"Write {name}=https://host:port")
    if "@" in parts.netloc:
        raise BadReference(
            f"The {name} holds credentials.", hint="Leave them out; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    return text


def _parse_sse(text: str | None) -> Literal["AES256", "aws:kms"] | None:
    if text in (None, "AES256", "aws:kms"):
        return text  # type: ignore[return-value]  # mypy does not narrow a str by membership
    raise BadReference(f"There is no encryption '{text}'.", hint="Write sse=AES256 or sse=aws:kms")


def _parse_flag(options: Mapping[str, str], name: str) -> bool | None:
    """Return an option that is true or false; ``None`` if it is not given."""
    text = options.get(name, "").lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    if not text:
        return None
    raise BadReference(f"The option '{name}' is neither true nor false.", hint=f"Write {name}=true")


def _decode_path(text: str) -> str:
    """Decode a percent-encoded path. Raise ``BadReference`` if it is not UTF-8."""
    try:
        path = unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise BadReference("The path of the store URL is not UTF-8.", hint="Write each byte as %XX of UTF-8.") from None
    if "\0" in path:
        raise BadReference("The path of the store URL holds a NUL.")
    return path


def _suggest_nearest(word: str, known: Iterable[str], form: str) -> str:
    """Return a hint: the nearest known word, or all of them."""
    known = tuple(known)
    if near := find_nearest(word.lower(), known, 0.5):
        return f"Did you mean {form.format(near)}?"
    return f"There are {', '.join(form.format(name) for name in known)}." if known else "It takes none."
