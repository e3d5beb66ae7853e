"""TLS by certificate files: the service speaks it, the client believes the right certificate only, and bad files are named."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from sidecar.client import Client, Retries, ServiceUnreachable
from sidecar.errors import BadConfig
from sidecar.service.door.tls import load_tls
from sidecar.service.settings import Service as Settings
from tests.parts import forked_sidecar
from tests.parts.services import TOKEN, serving

pytestmark = pytest.mark.usefixtures("forked_programs")

ONCE = Retries(attempts=1)


def certificate(folder: Path, passphrase: bytes = b"") -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    folder.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "memory-sidecar test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    kept = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    encoding = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(made.public_bytes(encoding))
    (folder / "key.pem").write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, kept))
    return folder / "cert.pem", folder / "key.pem"


def test_the_service_speaks_tls_and_the_client_believes_the_right_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path / "own")
    other, _ = certificate(tmp_path / "other")
    tls: dict[str, Any] = {"tls_cert": str(cert), "tls_key": str(key), "header_timeout": 1}
    monkeypatch.setenv("MEMORY_SIDECAR_TOKEN", TOKEN)
    with serving(tmp_path / "store", tmp_path / "log", **tls) as service:
        assert service.url.startswith("https://127.0.0.1:")
        for ca in ("", str(other)):
            monkeypatch.setenv("MEMORY_SIDECAR_CA", ca)
            with pytest.raises(ServiceUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
                Client(service.url, retries=ONCE).memories()
        monkeypatch.setenv("MEMORY_SIDECAR_CA", str(cert))
        assert Client(service.url).memories() == []
        # What does not come to speak TLS is ended, and does not hold up those that do.
        silent = [socket.create_connection(("127.0.0.1", service.port), 20) for _ in range(700)]
        plain = socket.create_connection(("127.0.0.1", service.port), 20)
        plain.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        trusting = ssl.create_default_context(cafile=str(cert))
        assert httpx.get(f"{service.url}/readyz", verify=trusting, timeout=10).status_code == 200
        for connection in (*silent, plain):
            assert _is_ended(connection)
            connection.close()
        assert Client(service.url).memories() == []
        assert "Traceback" not in service.log.read_text() and len(service.lines()) < 30


def _is_ended(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path / "own")
    _, other = certificate(tmp_path / "other")
    _, locked = certificate(tmp_path / "locked", b"a passphrase")
    empty = tmp_path / "empty"
    empty.write_text("")
    for tls_cert, tls_key, words in (
        (tmp_path / "none", key, "[service] tls_cert: the file"),
        (cert, tmp_path / "none", "[service] tls_key: the file"),
        (cert, tmp_path, "[service] tls_key: the file"),
        (empty, key, "[service] tls_cert: the file"),
        (key, key, "[service] tls_cert: the file"),
        (cert, empty, "holds no private key"),
        (cert, cert, "holds no private key"),
        (cert, other, "does not belong to the certificate"),
        (tmp_path / "locked" / "cert.pem", locked, "is protected by a passphrase"),
    ):
        with pytest.raises(BadConfig) as refused:
            load_tls(Settings(tls_cert=str(tls_cert), tls_key=str(tls_key)))
        assert words in refused.value.message, (tls_cert, tls_key)
    assert load_tls(Settings()) is None
    assert load_tls(Settings(tls_cert=str(cert), tls_key=str(key))) is not None


@pytest.mark.parametrize(("words", "code"), [(("serve", "--bind=127.0.0.1:0"), 2), (("config", "check"), 2)])
def test_the_line_of_a_bad_file_is_told_before_anything_is_served(
    tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    cert, _ = certificate(tmp_path / "own")
    config = tmp_path / "c.toml"
    config.write_text(f"store = 'file:{tmp_path}/store'\n[service]\ntls_cert = '{cert}'\ntls_key = '{tmp_path}/none'\n")
    ran = forked_sidecar.run([*words, f"--config={config}"], text=True)
    assert ran.returncode == code and "Traceback" not in ran.stderr
    assert f"{config}:4: [service] tls_key" in ran.stdout + ran.stderr


def test_a_command_beside_the_service_needs_no_certificate(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path / "own")
    config = tmp_path / "c.toml"
    config.write_text(f"[service]\ntls_cert = '{cert}'\ntls_key = '{key}'\n")
    child = "import os, sidecar.client as c; print(os.environ['MEMORY_SIDECAR_URL'], c.Client().memories())"
    command = ["run", f"--store=file:{tmp_path}/store", f"--config={config}", "--", sys.executable, "-c", child]
    ran = forked_sidecar.run(command, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("http://127.0.0.1:") and ran.stdout.endswith("[]\n")


def test_a_file_of_certificates_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").write_text("no certificate")
    for name, words in (("none", "No such file"), ("empty", "it holds no certificate")):
        monkeypatch.setenv("MEMORY_SIDECAR_CA", str(tmp_path / name))
        with pytest.raises(BadConfig, match=f"MEMORY_SIDECAR_CA.*{words}"):
            Client("https://127.0.0.1:1")
