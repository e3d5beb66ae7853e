"""What a store that seals promises beyond what every store does: nothing readable, and no key taken for damage."""

from __future__ import annotations

import asyncio
import base64
import hmac
import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyrage
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sidecar.errors import BadConfig, KeyNeeded, ObjectRefused, StoreUnreachable
from sidecar.host.files import SpoolFull
from sidecar.ids import MemoryKeys as MemoryKeys
from sidecar.store.encryption import passphrase
from sidecar.store.encryption.encrypted_store import EncryptedStore
from sidecar.store.encryption.given_keys import GivenKeys, read_given_keys
from sidecar.store.encryption.keyring import MAGIC, Keyring
from sidecar.store.encryption.names import HiddenNames, is_opaque
from sidecar.store.encryption.opening import EncryptionKeys, KeysLost
from sidecar.store.encryption.record import COPY, RECORD
from sidecar.store.encryption.rekey import IdentityChange
from sidecar.store.encryption.settings import Encryption, Signing
from tests.parts.keys import ONE, OTHER, quickly_sealed, recipient
from tests.parts.memory_store import MemoryStore

MIB = 1 << 20
HEAD = "memories/conductor/head.json"


def sealed(inner: MemoryStore, *identities: str, recipients: tuple[str, ...] = ()) -> EncryptedStore:
    return EncryptedStore(inner, EncryptionKeys(recipients=recipients, identities=identities) if identities else None)


async def read(store: EncryptedStore, key: str) -> bytes:
    return b"".join([chunk async for chunk in store.stream(key)])


async def test_nothing_of_a_key_or_its_bytes_shows() -> None:
    inner = MemoryStore()
    store = sealed(inner, ONE)
    keys = [
        HEAD,
        "memories/conductor/calls/0123abcd",
        "attachments/conductor.json",
        "instances/host-1.json",
        "outbox/0f/1.json",
    ]
    for key in keys:
        await store.put(key, b"the agent's words")
    everything = b"\n".join(key.encode() + data for key, (data, _, _) in inner.objects.items())
    for word in (b"conductor", b"host-1", b"0123abcd", b"words"):
        assert word not in everything
    assert all(data.startswith(MAGIC) for data, _, _ in inner.objects.values())
    assert [info.key async for info in store.list("memories/")] == sorted(keys[:2])
    assert [info.key async for info in store.list("attachments/")] == ["attachments/conductor.json"]


def test_names_have_one_length_and_come_back() -> None:
    names = HiddenNames(bytes(range(64)), {"memories": ["old"]})
    ids = ["a", "x" * 63, MemoryKeys.of("acme/agent-7" * 9).prefix.split("/")[1], "agent ü", "old"]
    hidden = [names.hide(f"memories/{name}/head.json") for name in ids]
    assert [names.shown(key) for key in hidden] == [f"memories/{name}/head.json" for name in ids]
    assert {len(key) for key in hidden[:-1]} == {len(hidden[0])}
    assert hidden[-1] == "memories/old/head.json"
    same = [names.hide(f"{root}/a/x").split("/")[1] for root in ("memories", "attachments", "instances", "outbox")]
    assert len(set(same)) == 4
    assert all(map(is_opaque, same))
    assert names.shown(f"attachments/{same[0]}/x") == f"attachments/{same[0]}/x"
    assert names.hide("memories/") == "memories/"
    assert names.hide("sealing") == "sealing"


def test_a_name_is_hidden_as_the_format_page_says() -> None:
    tags, streams = bytes(range(32)), bytes(range(32, 64))
    filled = b"conductor".ljust(80, b"\0")
    tag = hmac.digest(tags, b"memories\0" + filled, "sha256")[:16]
    stream = b"".join(hmac.digest(streams, tag + struct.pack(">Q", at), "sha256") for at in (0, 32, 64))
    covered = (int.from_bytes(filled, "big") ^ int.from_bytes(stream[:80], "big")).to_bytes(80, "big")
    text = base64.b32encode(tag + covered).decode().lower().rstrip("=")
    names = HiddenNames(tags + streams, {})
    assert names.hide("memories/conductor/head.json") == f"memories/{text}/head.json"
    assert names.shown(f"memories/{text}/head.json") == "memories/conductor/head.json"
    # The last letter has two bits to spare: what only decodes to the same is not the same.
    spare = text[:-1] + chr(ord(text[-1]) + 1)
    for altered in (("a" if text[0] != "a" else "b") + text[1:], spare):
        assert names.shown(f"memories/{altered}/head.json") == f"memories/{altered}/head.json"


async def test_what_was_there_before_stays_readable_and_usable() -> None:
    inner = MemoryStore()
    plain = sealed(inner)
    await plain.put(HEAD, b"old head")
    await plain.put("memories/conductor/packs/1.tar.gz", b"old pack")
    store = sealed(inner, ONE)
    assert (await store.get(HEAD)).data == b"old head"  # type: ignore[union-attr]
    assert [info.key async for info in store.list("memories/")] == [HEAD, "memories/conductor/packs/1.tar.gz"]
    await store.prepare()
    await store.put("memories/conductor/packs/2.tar.gz", b"new pack")
    await store.put("memories/brand-new/head.json", b"new head")
    for again in (store, sealed(inner, ONE)):
        assert await read(again, "memories/conductor/packs/1.tar.gz") == b"old pack"
        assert await read(again, "memories/conductor/packs/2.tar.gz") == b"new pack"
        assert await read(again, "memories/brand-new/head.json") == b"new head"
        assert {info.key.split("/")[1] async for info in again.list("memories/")} == {"conductor", "brand-new"}
    assert inner.objects["memories/conductor/packs/2.tar.gz"][0].startswith(MAGIC)
    assert not any("brand-new" in key for key in inner.objects)


async def test_two_that_begin_at_once_agree_on_the_names() -> None:
    inner = MemoryStore()
    stores = [sealed(inner, ONE) for _ in range(8)]
    await asyncio.gather(*(store.put(f"memories/{number}/x", b"1") for number, store in enumerate(stores)))
    for store in stores:
        assert [info.key async for info in store.list("memories/")] == [f"memories/{n}/x" for n in range(8)]


@pytest.mark.parametrize("identities", [(), (OTHER,)])
async def test_without_the_key_nothing_is_missing_and_nothing_is_written(identities: tuple[str, ...]) -> None:
    inner = MemoryStore()
    await sealed(inner, ONE).put(HEAD, b"1")
    before = dict(inner.objects)
    store = sealed(inner, *identities)
    for attempt in (
        lambda: store.prepare(),
        lambda: store.get(HEAD),
        lambda: store.get("memories/no-such/head.json"),
        lambda: read(store, HEAD),
        lambda: store.put(HEAD, b"2"),
        lambda: store.swap(HEAD, b"2", expected=None),
    ):
        with pytest.raises(KeyNeeded):
            await attempt()
    with pytest.raises(KeyNeeded):
        [info async for info in store.list("memories/conductor/")]
    assert inner.objects == before


async def test_a_plain_sidecar_stops_when_a_store_becomes_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    from sidecar.store.encryption import opening

    monkeypatch.setattr(opening, "BELIEVED_SECONDS", 0.0)
    inner = MemoryStore()
    plain = sealed(inner)
    await plain.put(HEAD, b"1")
    await sealed(inner, ONE).prepare()
    with pytest.raises(KeyNeeded):
        await plain.put(HEAD, b"2")


async def test_a_lost_record_is_no_empty_store() -> None:
    inner = MemoryStore()
    store = sealed(inner, ONE)
    await store.put(HEAD, b"1")
    kept = inner.objects.pop(RECORD)
    assert (await sealed(inner, ONE).get(HEAD)).data == b"1"  # type: ignore[union-attr]
    await sealed(inner, ONE).prepare()
    assert RECORD in inner.objects, "mended from its copy"
    inner.objects[RECORD] = (b"x" + kept[0][1:], *kept[1:])
    await sealed(inner, ONE).prepare()
    assert inner.objects[RECORD][0].startswith(MAGIC)
    kept = inner.objects[RECORD]
    del inner.objects[RECORD], inner.objects[COPY]
    for attempt in (sealed(inner, ONE).get(HEAD), sealed(inner, ONE).prepare(), sealed(inner, ONE).put(HEAD, b"2")):
        with pytest.raises(KeysLost):
            await attempt
    inner.objects[RECORD] = kept
    assert (await sealed(inner, ONE).get(HEAD)).data == b"1"  # type: ignore[union-attr]


@pytest.mark.parametrize("at", [0, 30, 60, 130, -1])
async def test_an_altered_object_is_damage_to_whoever_has_all_keys(at: int) -> None:
    inner = MemoryStore()
    store = sealed(inner, ONE)
    key = "memories/conductor/packs/1.tar.gz"
    await store.put(key, b"x" * 100)
    hidden = next(name for name in inner.objects if name.endswith("packs/1.tar.gz"))
    data, *rest = inner.objects[hidden]
    flipped = bytearray(data)
    flipped[at] ^= 1
    inner.objects[hidden] = (bytes(flipped), *rest)  # type: ignore[assignment]
    if at == 0:
        assert await read(store, key) == bytes(flipped), "not an age file any more: its hash tells"
        return
    with pytest.raises(ObjectRefused, match=r"packs/1\.tar\.gz"):
        await read(store, key)
    with pytest.raises(ObjectRefused) as refused:
        await store.get(key)
    assert refused.value.version == rest[1]


async def test_an_object_under_a_hidden_name_is_sealed_or_refused() -> None:
    inner = MemoryStore()
    await inner.put("memories/before/head.json", b"from before")
    store = sealed(inner, ONE)
    await store.put(HEAD, b"1")
    hidden = next(name for name in inner.objects if name.endswith("/head.json") and "before" not in name)
    for planted in (b"", b"{}"):
        await inner.put(hidden, planted)
        with pytest.raises(ObjectRefused, match=r"conductor/head\.json is damaged: it is not sealed") as refused:
            await store.get(HEAD)
        await store.swap(HEAD, b"2", expected=refused.value.version)
        assert (await store.get(HEAD)).data == b"2"  # type: ignore[union-attr]
    assert (await store.get("memories/before/head.json")).data == b"from before"  # type: ignore[union-attr]


async def test_what_is_for_an_older_key_is_not_taken_for_damage() -> None:
    inner = MemoryStore()
    await sealed(inner, ONE).put(HEAD, b"1")
    rotating = sealed(inner, ONE, OTHER, recipients=(recipient(OTHER),))
    await rotating.put("memories/conductor/new", b"2")
    later = sealed(inner, OTHER)
    assert (await later.get("memories/conductor/new")).data == b"2"  # type: ignore[union-attr]
    with pytest.raises(KeyNeeded, match="head"):
        await later.get(HEAD)
    assert (await rotating.get(HEAD)).data == b"1"  # type: ignore[union-attr]


@pytest.mark.parametrize("really", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_passphrase_opens_what_it_sealed_and_plain_age_does_in_two_steps(
    really: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not really:
        monkeypatch.setattr(passphrase, "_encrypt", quickly_sealed)
    inner = MemoryStore()
    keys = EncryptionKeys(passphrase="correct horse battery staple")
    await EncryptedStore(inner, keys).put(HEAD, b"1")
    assert (await EncryptedStore(inner, keys).get(HEAD)).data == b"1"  # type: ignore[union-attr]
    assert not any(b"horse" in data for data, _, _ in inner.objects.values())
    for wrong in (EncryptionKeys(passphrase="wrong"), EncryptionKeys(identities=(ONE,))):
        with pytest.raises(KeyNeeded):
            await EncryptedStore(inner, wrong).get(HEAD)
    identity = pyrage.passphrase.decrypt(inner.objects["identity.age"][0], keys.passphrase).decode().strip()
    hidden = next(data for name, (data, _, _) in inner.objects.items() if name.endswith("head.json"))
    assert pyrage.decrypt(hidden, [pyrage.x25519.Identity.from_str(identity)]) == b"1"


def test_a_passphrase_opens_also_where_the_machine_is_slow_or_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    data = quickly_sealed("the identity", "correct horse")

    def refuse(data: bytes, passphrase: str) -> bytes:
        raise pyrage.DecryptError("Excessive work parameter for passphrase.\nDecryption would take around 64 seconds.")

    monkeypatch.setattr(pyrage.passphrase, "decrypt", refuse)
    assert passphrase._decrypt(data, "correct horse") == "the identity"
    assert passphrase._decrypt(data, "wrong horse") == ""
    for at in range(len(data)):  # salt, work, key, hash, nonce, text
        altered = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        assert passphrase._decrypt(altered, "correct horse") == ""
        assert passphrase._decrypt(data[:at], "correct horse") == ""


class Slow(MemoryStore):
    """Hands out a large object piece by piece, and may fail on the way."""

    def __init__(self, size: int, fail_at: int | None = None) -> None:
        super().__init__()
        self.size, self.fail_at = size, fail_at

    async def stream(self, key: str):  # type: ignore[no-untyped-def]
        data = self.objects[key][0]
        for at in range(0, len(data), self.size):
            if self.fail_at is not None and at >= self.fail_at:
                raise StoreUnreachable("cut")
            yield data[at : at + self.size]


@pytest.mark.parametrize("piece", [1, 1000, MIB])
async def test_any_pieces_are_opened_as_they_come(piece: int) -> None:
    inner = Slow(piece)
    store, data = sealed(inner, ONE), random.Random(1).randbytes(3000 if piece == 1 else 3 * MIB + 17)
    await store.put("memories/m/packs/p", data)
    chunks = [chunk async for chunk in store.stream("memories/m/packs/p")]
    assert b"".join(chunks) == data
    assert max(map(len, chunks)) <= MIB


async def test_trouble_below_comes_out_as_what_it_is_and_leaving_early_harms_nothing() -> None:
    inner = Slow(1 << 16, fail_at=2 * MIB)
    store = sealed(inner, ONE)
    await store.put("memories/m/packs/p", random.Random(1).randbytes(4 * MIB))
    with pytest.raises(StoreUnreachable):
        await read(store, "memories/m/packs/p")
    async for _ in store.stream("memories/m/packs/p"):
        break
    # More at once than the pool has threads: none waits for another.
    inner.fail_at = None
    await asyncio.wait_for(asyncio.gather(*(read(store, "memories/m/packs/p") for _ in range(12))), 60)


async def test_a_large_object_never_is_in_memory_whole(tmp_path: Path) -> None:
    from adapters.stores.disk import DiskStore

    store = EncryptedStore(DiskStore(tmp_path / "store", url="file:"), EncryptionKeys(identities=(ONE,)))
    source = tmp_path / "source"
    source.write_bytes(bytes(24 * MIB))
    await store.prepare()
    tracemalloc.start()
    await store.put("memories/m/packs/p", source)
    length = 0
    async for chunk in store.stream("memories/m/packs/p"):
        length += len(chunk)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert length == 24 * MIB
    assert peak < 10 * MIB
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["source"], "no scratch file is left"


def test_no_room_to_seal_in_is_told(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(1 << 20))
    with pytest.raises(SpoolFull, match="No space left"):
        Keyring([], [ONE]).encrypt_file(source, Path("/dev/full"))


def test_ssh_keys_seal_and_open(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    private = key.private_bytes(*form).decode()
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    ring = Keyring([], [private])
    assert ring.recipients == (public,)
    assert ring.open(Keyring([f"{public} me@host", recipient(ONE)], [ONE]).seal(b"1")) == b"1"


@pytest.mark.parametrize(
    ("recipients", "identities", "said"),
    [
        (["age1nonsense"], [ONE], "no age recipient"),
        ([recipient(OTHER)], [ONE], "could never be read"),
        ([recipient(ONE)], [], "could never be read"),
        ([], ["AGE-SECRET-KEY-1NONSENSE"], "is none"),
        ([], ["# nothing"], "is none"),
        ([], ["-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----"], "is none"),
        ([ONE], [ONE], "no age recipient"),
    ],
)
def test_keys_that_are_none_are_refused_without_being_repeated(
    recipients: list[str], identities: list[str], said: str
) -> None:
    with pytest.raises(BadConfig, match=said) as refused:
        Keyring(recipients, identities)
    assert "SECRET-KEY-1" not in refused.value.message


def test_keys_come_from_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, words = tmp_path / "key", tmp_path / "passphrase"
    key.write_text(f"# created\n{ONE}\n")
    key.chmod(0o600)
    words.write_text("words\n")
    words.chmod(0o644)
    found = read_given_keys(Encryption(identity_files=[str(key)], passphrase_file=str(words)), Signing())
    assert found.passphrase == "words"
    assert ONE in found.identities[0]
    assert len(found.warnings) == 1
    assert "passphrase" in found.warnings[0]
    assert ONE not in repr(found)
    assert "words" not in repr(found)
    monkeypatch.setenv("MEMORY_SIDECAR_IDENTITY", OTHER)
    monkeypatch.setenv("MEMORY_SIDECAR_RECIPIENTS", f"{recipient(OTHER)}, {recipient(ONE)}")
    monkeypatch.setenv("MEMORY_SIDECAR_PASSPHRASE", "others")
    found = read_given_keys(Encryption(identity_files=[str(key)]), Signing())
    assert (len(found.identities), found.passphrase, len(found.recipients)) == (2, "others", 2)
    for path, said in ((tmp_path / "none", "cannot be read"), (tmp_path, "cannot be read")):
        with pytest.raises(BadConfig, match=said):
            read_given_keys(Encryption(identity_files=[str(path)]), Signing())
    key.write_text(" \n")
    with pytest.raises(BadConfig, match="empty"):
        read_given_keys(Encryption(identity_files=[str(key)]), Signing())


def test_no_keys_are_no_keys() -> None:
    assert not GivenKeys().encrypts
    assert not GivenKeys().signs


@pytest.mark.parametrize(
    ("given_keys", "loaded"), [("", []), (f"identities=({ONE!r},)", ["pyrage"])], ids=["no keys", "an identity"]
)
def test_only_the_libraries_that_keys_need_are_loaded(tmp_path: Path, given_keys: str, loaded: list[str]) -> None:
    program = f"""
import asyncio, sys
from sidecar.store.encryption.given_keys import GivenKeys
from sidecar.wiring import open_repository
store = open_repository("file:{tmp_path}", GivenKeys({given_keys})).store
asyncio.run(store.put("memories/conductor/head.json", b"1"))
print([name for name in ("pyrage", "cryptography") if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == repr(loaded)


async def test_a_name_that_is_not_ours_is_named_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    inner = MemoryStore()
    store = sealed(inner, ONE)
    await store.put(HEAD, b"ours")
    await store.put("memories/conductor/calls/0123", b"ours")
    ours = sorted([info.key async for info in store.list("memories/")])
    folder = next(key for key in inner.objects if key.endswith("/head.json")).rpartition("/")[0]
    planted = [f"memories/{'a' * 160}/head.json", f"{folder}/calls/{'b' * 160}", "memories/readable/head.json"]
    for key in planted:
        await inner.put(key, b"{}")
    assert sorted([info.key async for info in store.list("memories/")]) == ours
    for key in planted:
        assert key.removesuffix("/head.json") in caplog.text


@pytest.mark.parametrize("key", [passphrase.IDENTITY, passphrase.COPY])
@pytest.mark.parametrize("how", ["cut", "gone"])
async def test_a_twin_of_the_identity_that_is_not_as_it_was(
    monkeypatch: pytest.MonkeyPatch, key: str, how: str
) -> None:
    monkeypatch.setattr(passphrase, "_encrypt", quickly_sealed)
    inner = MemoryStore()
    await EncryptedStore(inner, EncryptionKeys(passphrase="words")).put(HEAD, b"head")
    assert await passphrase.check_identities(inner, ["words"]) == []
    data = inner.objects[key][0]
    await inner.delete([key]) if how == "gone" else await inner.put(key, data[: len(data) // 2])
    (problem,) = await passphrase.check_identities(inner, ["words"])
    assert problem.startswith(f"{key} is ")
    opening = EncryptedStore(inner, EncryptionKeys(passphrase="words")).opening
    await IdentityChange(opening).end()
    assert await passphrase.check_identities(inner, ["words"]) == []


@pytest.mark.parametrize("writing", [False, True])
async def test_without_its_identity_a_store_says_so_and_makes_no_other(
    monkeypatch: pytest.MonkeyPatch, writing: bool
) -> None:
    monkeypatch.setattr(passphrase, "_encrypt", quickly_sealed)
    inner = MemoryStore()
    await EncryptedStore(inner, EncryptionKeys(passphrase="words")).put(HEAD, b"head")
    await inner.delete([passphrase.IDENTITY, passphrase.COPY])
    before, store = dict(inner.objects), EncryptedStore(inner, EncryptionKeys(passphrase="words"))
    with pytest.raises(KeysLost, match=r"identity\.age") as refused:
        await (store.put(HEAD, b"head") if writing else store.get(HEAD))
    assert "identity.age" in (refused.value.hint or "")
    assert inner.objects == before
