"""Signatures: every form of key people have, and what a sidecar may do without one."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from adapters.sandboxes.local import open_local
from sidecar.engine import ExportRequest, RestoreRequest, export, restore
from sidecar.errors import BadConfig, KeyNeeded, SnapshotDamaged
from sidecar.receipts import ExportOutcome, RestoreOutcome
from sidecar.store.encryption.given_keys import GivenKeys, read_given_keys
from sidecar.store.encryption.settings import Encryption, Signing
from sidecar.store.encryption.signatures import BadSignature, Signatures, strip_signature
from tests.parts.homes import claude_mem_home, empty_home, observe
from tests.parts.keys import OTHER_SIGNING, SIGNED, SIGNING, engine_with, public_key

KEY = Ed25519PrivateKey.generate()
PLAIN = serialization.NoEncryption()
PEM, SSH, RAW = serialization.Encoding.PEM, serialization.Encoding.OpenSSH, serialization.Encoding.Raw
PRIVATE = {
    "pem": KEY.private_bytes(PEM, serialization.PrivateFormat.PKCS8, PLAIN).decode(),
    "pem after a comment": "# mine\n" + KEY.private_bytes(PEM, serialization.PrivateFormat.PKCS8, PLAIN).decode(),
    "openssh": KEY.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, PLAIN).decode(),
    "base64": base64.b64encode(KEY.private_bytes_raw()).decode(),
}
PUBLIC = {
    "pem": KEY.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode(),
    "openssh": KEY.public_key().public_bytes(SSH, serialization.PublicFormat.OpenSSH).decode() + " me@host",
    "base64": "public:" + base64.b64encode(KEY.public_key().public_bytes_raw()).decode(),
}
SECRET = "hmac-sha256:" + base64.b64encode(b"a secret of enough bytes").decode()
MEMORY = "conductor"


@pytest.mark.parametrize("data", [b"", b"x", b"x\n", b"\n", b'{"a":1}\n', b"\nsigned "])
@pytest.mark.parametrize("private", [*PRIVATE.values(), SECRET], ids=[*PRIVATE, "hmac"])
def test_what_is_signed_is_known_again(private: str, data: bytes) -> None:
    signed = Signatures(private, ()).sign("memories/m/head.json", data)
    assert strip_signature(signed) == data
    believers = [Signatures(private, ())]
    believers += [Signatures("", [public]) for public in PUBLIC.values()] if private != SECRET else []
    for believer in believers:
        assert believer.checked("memories/m/head.json", signed) == data
        with pytest.raises(BadSignature, match="under that name"):
            believer.checked("memories/n/head.json", signed)
        with pytest.raises(BadSignature):
            believer.checked("memories/m/head.json", signed.replace(data, data + b"y", 1) if data else b"y" + signed)
        with pytest.raises(BadSignature, match="is not signed"):
            believer.checked("memories/m/head.json", data)
    with pytest.raises(BadSignature, match="a key you trust"):
        Signatures(OTHER_SIGNING, ()).checked("memories/m/head.json", signed)


@pytest.mark.parametrize(
    "text",
    [
        *("nonsense", "hmac-sha256:c2hvcnQ=", "hmac-sha256:%%%", "ssh-ed25519 AAAA", "public:AAAA"),
        "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----",
        Ed448PrivateKey.generate().private_bytes(PEM, serialization.PrivateFormat.PKCS8, PLAIN).decode(),
        *PUBLIC.values(),
    ],
    ids=lambda text: text[:7].strip("-"),  # keys are new each time, and tests must not be named after them
)
def test_what_cannot_sign_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(BadConfig) as refused:
        Signatures(text, ())
    assert text not in refused.value.message


def test_no_secret_may_be_in_the_config_itself() -> None:
    for secret in (*PRIVATE.values(), SECRET):
        with pytest.raises(BadConfig, match="not public") as refused:
            read_given_keys(Encryption(), Signing(trusted=[secret]))
        assert secret not in refused.value.message
    assert read_given_keys(Encryption(), Signing(trusted=[*PUBLIC.values()])).signs


async def test_keys_of_others_may_be_trusted_and_a_reader_needs_no_private_one(tmp_path: Path) -> None:
    home, store = claude_mem_home(empty_home(tmp_path / "home"), 2), tmp_path / "store"
    await export(engine_with(store, SIGNED), open_local(str(home)), ExportRequest(memory=MEMORY))
    rotated = GivenKeys(signing_key=OTHER_SIGNING, trusted=(public_key(SIGNING),))
    observe(home, 1, "later")
    second = await export(engine_with(store, rotated), open_local(str(home)), ExportRequest(memory=MEMORY))
    assert (second.outcome, second.kind) == (ExportOutcome.COMMITTED, "delta")
    reader = GivenKeys(trusted=(public_key(SIGNING), public_key(OTHER_SIGNING)))
    back = await restore(engine_with(store, reader), open_local(str(empty_home(tmp_path / "o"))), _request())
    assert (back.outcome, back.snapshot, back.warnings) == (RestoreOutcome.COMPLETE, second.snapshot, [])
    observe(home, 1, "unsaved")
    with pytest.raises(KeyNeeded):
        await export(engine_with(store, reader), open_local(str(home)), ExportRequest(memory=MEMORY))
    # Who trusts the first key alone gets what that key signed, and is told.
    older = await restore(engine_with(store, SIGNED), open_local(str(empty_home(tmp_path / "p"))), _request())
    assert older.outcome is RestoreOutcome.COMPLETE
    assert older.snapshot != second.snapshot
    assert "not signed by a key you trust" in " ".join(older.warnings)


async def test_without_keys_a_signed_store_is_read_and_not_added_to(tmp_path: Path) -> None:
    home, store = claude_mem_home(empty_home(tmp_path / "home"), 2), tmp_path / "store"
    await export(engine_with(store, SIGNED), open_local(str(home)), ExportRequest(memory=MEMORY))
    back = await restore(engine_with(store, GivenKeys()), open_local(str(empty_home(tmp_path / "o"))), _request())
    assert (back.outcome, back.warnings) == (RestoreOutcome.COMPLETE, [])
    observe(home, 1, "later")
    for memory in (MEMORY, "another"):
        with pytest.raises(KeyNeeded, match="signed"):
            await export(engine_with(store, GivenKeys()), open_local(str(home)), ExportRequest(memory=memory))
    assert await engine_with(store, SIGNED).repository.memories() == [MEMORY]
    with pytest.raises(SnapshotDamaged):
        strangers = GivenKeys(signing_key=OTHER_SIGNING)
        await restore(engine_with(store, strangers), open_local(str(empty_home(tmp_path / "p"))), _request())
    assert not [*store.rglob("damaged/*")], "another key is no damage"


def _request() -> RestoreRequest:
    return RestoreRequest(memory=MEMORY)
