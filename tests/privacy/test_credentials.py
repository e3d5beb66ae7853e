"""Credentials are found by their looks, wherever a text is cut; what only resembles them is left alone."""

from __future__ import annotations

import random

import pytest

from sidecar.inside.credentials import KINDS, Credentials, may_hold
from tests.parts.secret_trees import CREDENTIALS

OTHERS = {
    "aws-secret-key": ('aws_secret_access_key = "{}"', "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEYxx"),
    "openrouter-key": ("{}", "sk-or-v1-" + "0a" * 32),
    "google-oauth-secret": ("{}", "GOCSPX-" + "a1B2" * 7),
    "google-access-token": ("{}", "ya29." + "a1B2" * 20),
    "slack-webhook": ("https://hooks.slack.com/services/{}", "T0123456/B0123456/" + "a1B2" * 6),
    "stripe-webhook-secret": ("{}", "whsec_" + "a1B2" * 8),
    "telegram-token": ("123456789{}", ":AA" + "a1B" * 11),
    "azure-key": ("AccountName=x;AccountKey={};", "a1B2" * 21 + "ab=="),
    "url-password": ("postgres://app:{}@db.example.com/x", "correct-horse"),
}
HARMLESS = (
    b"task-list risk-free disk-usage ask-me",
    b"sk-hunter2 tok-hunter2 key-hunter2",
    b"git@github.com:owner/repo.git https://example.com:8080/a@b ssh://git@host/x",
    b"postgres://user:$PASSWORD@host postgres://user:<password>@host postgres://user:***@host",
    b"AKIA is how they begin; so does AKIAABC and XAKIAIOSFODNN7EXAMPLE",
    b"-----BEGIN PUBLIC KEY-----\nMFwwDQYJKoZIhvcNAQEBBQADSwAwSAJBAK\n-----END PUBLIC KEY-----",
    b"it starts with -----BEGIN RSA PRIVATE KEY----- and so on",
    b"eyJhbGciOiJIUzI1NiJ9 alone is no token",
    b"0123456789abcdef" * 8,
)


def found(text: bytes, *, redact: bool, chance: random.Random | None = None) -> tuple[bytes, list[str]]:
    names: list[str] = []
    stream, out, at = Credentials(redact, lambda line, name: names.append(name)), b"", 0
    while chance is not None and at < len(text):
        size = chance.choice((1, 40, 1000, 40_000))
        out, at = out + stream.feed(text[at : at + size]), at + size
    return out + stream.feed(text[at:], True), names


def test_each_kind_is_tried() -> None:
    assert {kind.name for kind in KINDS} == {*CREDENTIALS, *OTHERS}


@pytest.mark.parametrize("name", sorted({*CREDENTIALS, *OTHERS}))
def test_each_kind_is_found_and_blotted_out(name: str) -> None:
    chance = random.Random(name)
    around, secret = OTHERS.get(name, ("{}", ""))
    secret = secret or CREDENTIALS[name](chance)
    for before, after in ((" ", "\n"), ('"', '"'), ("\\n", "\\n"), ("=", ","), ("", "")):
        text = f"{before}{around.format(secret)}{after}".encode()
        assert may_hold(text)
        assert found(text, redact=False) == (text, [name])
        left, names = found(text, redact=True)
        assert names == [name]
        assert left == f"{before}{around.format(f'[redacted:{name}]')}{after}".encode()
        assert found(left, redact=True) == (left, [])


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_resembles_one_is_left_alone(text: bytes) -> None:
    assert found(text, redact=True) == (text, [])


def test_they_are_found_across_pieces() -> None:
    for seed in range(40):
        chance = random.Random(seed)
        names = chance.choices(list(CREDENTIALS), k=4)
        fillers = ["x" * chance.choice((1, 100, 32_700, 60_000)) for _ in names]
        text = "\n".join(f"{filler} {CREDENTIALS[name](chance)}" for name, filler in zip(names, fillers, strict=True))
        expected = "\n".join(f"{filler} [redacted:{name}]" for name, filler in zip(names, fillers, strict=True))
        assert found(text.encode(), redact=True, chance=chance) == (expected.encode(), names)


def test_a_key_with_escaped_line_breaks_is_one_key() -> None:
    key = CREDENTIALS["private-key"](random.Random(1)).replace("\n", "\\n")
    assert found(f'{{"key": "{key}"}}'.encode(), redact=True)[0] == b'{"key": "[redacted:private-key]"}'
