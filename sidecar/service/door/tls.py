"""TLS by certificate files, for a service that has no proxy in front of it."""

from __future__ import annotations

import ssl

from sidecar.errors import BadConfig
from sidecar.service.settings import Service


def load_tls(settings: Service) -> ssl.SSLContext | None:
    """Return the TLS context of the service; ``None`` if no certificate is configured. Raise ``BadConfig``, naming the
    file."""
    if not settings.tls_cert:
        return None
    for option, file in (("tls_cert", settings.tls_cert), ("tls_key", settings.tls_key)):
        try:
            open(file, "rb").close()
        except (OSError, ValueError) as problem:
            why = getattr(problem, "strerror", None) or problem
            raise _build_config_error(option, f"the file {file} cannot be read: {why}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Loading both files together does not tell which one is wrong; this reads the certificate alone.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(settings.tls_cert)
    except ssl.SSLError:
        raise _build_config_error("tls_cert", f"the file {settings.tls_cert} holds no certificate (PEM)") from None

    def no_passphrase() -> bytes:
        raise _build_config_error("tls_key", f"the key in {settings.tls_key} is protected by a passphrase")

    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, no_passphrase)
    except ssl.SSLError as problem:
        mismatch = "mismatch" in str(problem).lower()
        why = f"does not belong to the certificate in {settings.tls_cert}" if mismatch else "holds no private key (PEM)"
        raise _build_config_error("tls_key", f"the file {settings.tls_key} {why}") from None
    return context


def _build_config_error(option: str, why: str) -> BadConfig:
    return BadConfig(f"[service] {option}: {why}.", at=("service", option))
