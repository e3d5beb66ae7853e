"""Ids of memories and snapshots, and the store keys made of them.

Ids are checked here only, and all keys are built here, so that every module uses the same ones.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import unicodedata
from datetime import UTC, datetime, timedelta

from sidecar.errors import BadMemoryId
from sidecar.host.text import is_unseen
from sidecar.host.values import dataclass

LONGEST_ID = 200
ROOT = "memories/"
ATTACHMENTS = "attachments/"
CONVERSATIONS = "conversations/"
INSTANCES = "instances/"
STARTS = "starts/"
WANTED = "wanted/"
NOTICED = "noticed/"
WRITERS = "writers/"
LISTINGS = "listings/"
AUDIT = "audit/"
STORE_ID = "store-id"
"""The key of a store's own id, by which records about several stores are told apart."""
AUDIT_LINES = f"{AUDIT}lines/"
AUDIT_TAILS = f"{AUDIT}tails/"
AUDIT_LATEST = f"{AUDIT}latest.json"
"""The object that names the chain which was begun last."""
AUDIT_DIGEST = 16
"""So many digits of a digest are in the name of an object of the audit."""
_AUDIT_LINES = re.compile(AUDIT_LINES + r"([^/]+)/([0-9]{9,12})-([0-9]{9,12})-([0-9a-f]{16})\.jsonl\Z")
_SNAPSHOT_ID = re.compile(r"[0-9]{8}T[0-9]{9}Z-[0-9a-f]{8}\Z")
_LAST = datetime(9999, 12, 31, 23, 59, 59, 999_000, UTC)
_PLAIN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")
_HASHED = re.compile(r"([a-z0-9._-]*)~([0-9a-f]{32})\Z")
_PORTABLE = re.compile(r"_([a-z0-9._-]*)_([0-9a-f]{32})\Z")


def check_memory_id(memory: str) -> str:
    """Return the id unchanged. Raise ``BadMemoryId`` unless a store may contain it.

    A new memory has to meet more conditions, see ``check_new_memory_id``.
    """
    if not 1 <= len(memory) <= LONGEST_ID:
        raise BadMemoryId(f"A memory id has 1 to {LONGEST_ID} characters; this one has {len(memory)}.")
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in memory):
        raise BadMemoryId("A memory id may not hold control characters or line breaks.")
    if any(part.strip() in ("", ".", "..") for part in memory.split("/")):
        raise BadMemoryId(f"{memory!r} is not a memory id: no part may be empty, '.' or '..'.")
    return memory


def check_new_memory_id(memory: str) -> str:
    """Return the id unchanged. Raise ``BadMemoryId`` unless a new memory may have it.

    An id must be unambiguous to the eye: of two ids that look the same, an agent would restore one and export to the
    other. Memories from before this rule keep their ids.
    """
    problem = _find_oddity(check_memory_id(memory))
    if problem:
        better = _strip_oddities(memory)
        raise BadMemoryId(
            f"'{escape_id(memory)}' is not an id for a new memory: {problem}.",
            hint=f"Write '{better}'." if better else "Write one that can be read off a screen and typed.",
        )
    return memory


def _find_oddity(memory: str) -> str:
    """Return what is invisible or ambiguous about an id; empty for nearly all ids."""
    for character in memory:
        category = unicodedata.category(character)
        if is_unseen(character) or category in ("Co", "Cn") or (category == "Zs" and character != " "):
            name = unicodedata.name(character, "a character without a name")
            return f"it holds U+{ord(character):04X}, {name}, which does not show as what it is"
    if any(part != part.strip() for part in memory.split("/")):
        return "a part of it begins or ends with a blank"
    if not unicodedata.is_normalized("NFC", memory):
        return "its letters and accents are written apart, where Unicode has them in one (NFC)"
    return ""


def _strip_oddities(memory: str) -> str:
    """Return a valid id that looks the same; empty if there is none."""
    seen = "".join(" " if unicodedata.category(c) == "Zs" else c for c in memory if not is_unseen(c))
    better = "/".join(part.strip() for part in unicodedata.normalize("NFC", seen).split("/"))
    try:
        return better if not _find_oddity(check_memory_id(better)) else ""
    except BadMemoryId:
        return ""


def escape_id(memory: str) -> str:
    """Return an id for display in lists. One that is ambiguous to the eye is escaped as in a shell's ``$'…'``."""
    if not _find_oddity(memory):
        return memory
    plain = set(string.ascii_letters + string.digits + "/._-~@+:,=")
    return "".join(c if c in plain else f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}" for c in memory)


def is_plain_id(memory: str) -> bool:
    """Whether an id can be used as a folder name unchanged."""
    return _PLAIN_ID.match(memory) is not None


def build_memory_key(memory: str) -> str:
    """Return a memory's folder name, in a store and in sandboxes: a plain id unchanged, any other as a readable part
    and a hash. In a store the folder may have the portable form of that name, see ``build_portable_folder``."""
    check_memory_id(memory)
    if is_plain_id(memory):
        return memory
    return f"{build_readable_part(memory)}~{hashlib.sha256(memory.encode()).hexdigest()[:32]}"


def build_readable_part(text: str) -> str:
    """Return what the folder of an id that is not plain, and begins with this text, begins with."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower())[:40].strip("-.")


def build_portable_folder(folder: str) -> str:
    """Return the form of a folder name that every S3-compatible server accepts; empty if the name itself is portable.

    Not all servers accept a ``~``. Letters, digits, ``-``, ``_`` and ``.`` work with all known servers, and no plain id
    begins with ``_``, so portable forms and plain ids never collide.
    """
    found = _HASHED.match(folder)
    return f"_{found[1]}_{found[2]}" if found else ""


def parse_portable_folder(name: str) -> str:
    """Return the folder name of a portable form; any other name unchanged."""
    found = _PORTABLE.match(name)
    return f"{found[1]}~{found[2]}" if found else name


@dataclass(frozen=True, slots=True)
class MemoryKeys:
    """The store keys of one memory."""

    prefix: str

    @classmethod
    def of(cls, memory: str) -> MemoryKeys:
        return cls(f"{ROOT}{build_memory_key(memory)}/")

    @property
    def head(self) -> str:
        return f"{self.prefix}head.json"

    @property
    def snapshots(self) -> str:
        return f"{self.prefix}snapshots/"

    @property
    def packs(self) -> str:
        return f"{self.prefix}packs/"

    @property
    def damaged(self) -> str:
        return f"{self.prefix}damaged/"

    @property
    def marks(self) -> str:
        return f"{self.prefix}marks/"

    @property
    def pins(self) -> str:
        return f"{self.prefix}pins/"

    @property
    def refusals(self) -> str:
        """The object that counts how often guards objected to replacing the present head."""
        return f"{self.prefix}refusals.json"

    @property
    def reviews(self) -> str:
        """The object that says which snapshots wait for a review, and what was decided about others."""
        return f"{self.prefix}reviews.json"

    @property
    def heads(self) -> str:
        return f"{self.prefix}heads/"

    def witness(self, generation: int) -> str:
        """The copy of the head of that generation, in a signed store."""
        return f"{self.heads}{generation:012d}"

    @property
    def clock(self) -> str:
        """An object that is written only to read the store's clock."""
        return f"{self.prefix}clock"

    @property
    def calls(self) -> str:
        return f"{self.prefix}calls/"

    def call(self, key: str) -> str:
        """The record of a call that its caller may repeat, by the caller's idempotency key."""
        return f"{self.calls}{hashlib.sha256(key.encode()).hexdigest()}"

    def mark(self, pack: str) -> str:
        """The mark that no snapshot needs a pack any more."""
        return f"{self.marks}{pack}"

    def pin(self, snapshot: str) -> str:
        return f"{self.pins}{snapshot}"

    def damage(self, snapshot: str) -> str:
        return f"{self.damaged}{snapshot}"

    def snapshot(self, snapshot: str) -> str:
        return f"{self.snapshots}{snapshot}.json"

    def pack(self, pack: str, codec: str) -> str:
        return f"{self.packs}{pack}.tar.{codec}"

    def index(self, pack: str) -> str:
        return f"{self.packs}{pack}.index.gz"

    def start_of(self, pack: str) -> str:
        """Return how the keys of a pack and of its index begin."""
        return f"{self.packs}{pack}."

    def parse_pack_id(self, key: str) -> str:
        """Return the id of the pack that a key below ``packs`` belongs to: the pack's own key or its index's."""
        return key[len(self.packs) :].partition(".")[0]


def build_attachment_key(memory: str) -> str:
    """Return the key of the first attachment of a memory, the only one that versions before there could be several
    know. For an id that is not plain no new object is written under this key: not every server accepts a ``~``."""
    return f"{ATTACHMENTS}{build_memory_key(memory)}.json"


def build_conversation_key(memory: str, sandbox: str) -> str:
    """Return the key of any other attachment of a memory, below a prefix that those versions never list."""
    check_memory_id(memory)
    named = hashlib.sha256(f"{memory}\0{sandbox}".encode(errors="surrogatepass")).hexdigest()
    return f"{CONVERSATIONS}{named[:40]}.json"


def build_instance_key(instance: str) -> str:
    """Return the key of a service's lease."""
    return f"{INSTANCES}{instance}.json"


def build_start_key(memory: str, key: str) -> str:
    """Return the key of the record of a sandbox that is being created, by the caller's idempotency key. Its last part is
    also the name by which the sandbox is found at its provider."""
    named = hashlib.sha256(f"{check_memory_id(memory)}\0{key}".encode(errors="surrogatepass")).hexdigest()
    return f"{STARTS}{named[:40]}"


def build_wanted_key(memory: str) -> str:
    """Return the key of what is known about a memory that is to have a living sandbox."""
    return f"{WANTED}{hashlib.sha256(check_memory_id(memory).encode(errors='surrogatepass')).hexdigest()[:40]}.json"


def build_notice_key(sandbox: str) -> str:
    """Return the key of what is known about a sandbox that names its memory itself."""
    provider, named = sandbox.partition(":")[0], hashlib.sha256(sandbox.encode(errors="surrogatepass")).hexdigest()
    return f"{build_notice_prefix(provider)}{named[:40]}"


def build_notice_prefix(provider: str) -> str:
    """Return what the keys for all sandboxes of a provider begin with."""
    return f"{NOTICED}{re.sub(r'[^a-z0-9]', '', provider)}/"


def build_writer_key(memory: str) -> str:
    """Return the key of the object that says which of the sandboxes that name a memory may change it."""
    return f"{WRITERS}{hashlib.sha256(check_memory_id(memory).encode(errors='surrogatepass')).hexdigest()[:40]}.json"


def build_listing_key(digest: str) -> str:
    """Return the key of the object that says which service lists a provider's sandboxes for these tables of the config."""
    return f"{LISTINGS}{digest[:40]}.json"


def build_outbox_prefix(url: str) -> str:
    """Return the prefix of a webhook's events that are not sent yet."""
    return f"outbox/{hashlib.sha256(url.encode()).hexdigest()[:16]}/"


@dataclass(frozen=True, slots=True)
class AuditKeys:
    """The store keys of one chain of the audit."""

    chain: str

    def lines(self, first: int, last: int, digest: str) -> str:
        """The object with these lines; ``digest`` is that of the last."""
        return f"{AUDIT_LINES}{self.chain}/{first:09d}-{last:09d}-{digest[:AUDIT_DIGEST]}.jsonl"

    @property
    def tail(self) -> str:
        """The object that says how many lines the chain has at least. Apart from them, so that what removes the one
        leaves the other."""
        return f"{AUDIT_TAILS}{self.chain}.json"

    @staticmethod
    def parse_tail(key: str) -> str:
        """Return the chain of a tail's key."""
        return key.removeprefix(AUDIT_TAILS).removesuffix(".json")

    @staticmethod
    def parse_lines(key: str) -> tuple[str, int, int, str]:
        """Return the chain, the first and the last line and the digest in the key of an object with lines. Raise
        ``ValueError`` if it is no such key."""
        found = _AUDIT_LINES.match(key)
        if found is None:
            raise ValueError(f"{key} is no object of an audit")
        return found[1], int(found[2]), int(found[3]), found[4]


def make_chain_id(now: datetime) -> str:
    """Return the id of a new chain of the audit. It sorts by time, as a snapshot's."""
    return make_snapshot_id(now)


def make_snapshot_id(now: datetime, after: str = "") -> str:
    """Return a new id that sorts by time, and after ``after`` even if the clock was set back; except after the last
    possible time, which nothing can follow."""
    if is_snapshot_id(after) and (last := parse_snapshot_time(after)) < _LAST:
        now = max(now, last + timedelta(milliseconds=1))
    return f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03d}Z-{secrets.token_hex(4)}"


def is_snapshot_id(text: str) -> bool:
    """Whether a text has the form of a snapshot id, with a valid time in it."""
    try:
        return _SNAPSHOT_ID.match(text) is not None and bool(parse_snapshot_time(text))
    except ValueError:
        return False


def parse_snapshot_time(snapshot: str) -> datetime:
    """Return the time in a snapshot id. Raise ``ValueError``."""
    stamp = snapshot.partition("Z-")[0]
    # Parsed by hand: importing ``strptime`` would be the slowest import of many commands.
    year, month, day, hour, minute, second, thousandths = (
        int(stamp[start:end]) for start, end in ((0, 4), (4, 6), (6, 8), (9, 11), (11, 13), (13, 15), (15, 18))
    )
    return datetime(year, month, day, hour, minute, second, thousandths * 1000, UTC)


def make_pack_id() -> str:
    """Return a new random pack id."""
    return secrets.token_hex(12)
