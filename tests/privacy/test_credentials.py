"""Credentials are found by their looks, wherever a text is cut; what only resembles them is left alone."""

from __future__ import annotations

import random

import pytest

from sidecar.program.privacy.credentials import KINDS, CredentialFilter, may_hold
from tests.parts.secret_trees import CREDENTIALS, LETTERS

pytestmark = pytest.mark.usefixtures("forked_programs")

OTHERS = {
    "aws-secret-key": ('aws_secret_access_key = "{}"', "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEYxx"),
    "openrouter-key": ("{}", "sk-or-v1-" + "0a" * 32),
    "google-oauth-secret": ("{}", "GOCSPX-" + "a1B2" * 7),
    "google-access-token": ("{}", "ya29." + "a1B2" * 20),
    "slack-webhook": ("https://hooks.slack.com/services/{}", "T0123456/B0123456/" + "a1B2" * 6),
    "stripe-webhook-secret": ("{}", "whsec_" + "a1B2" * 8),
    "telegram-token": ("123456789{}", ":AA" + "a1B" * 11),
    "azure-key": ("AccountName=x;AccountKey={};", "a1B2" * 21 + "ab=="),
    "groq-key": ("{}", "gsk_" + "a1B2" * 13),
    "xai-key": ("{}", "xai-" + "a1B2" * 20),
    "replicate-token": ("{}", "r8_" + "a1B2" * 9 + "c"),
    "perplexity-key": ("{}", "pplx-" + "a1B2" * 12),
    "nvidia-key": ("{}", "nvapi-" + "a1B2" * 16),
    "tavily-key": ("{}", "tvly-dev-" + "a1B2" * 8),
    "langsmith-key": ("{}", f"lsv2_pt_{'0a' * 16}_{'0a' * 5}"),
    "supabase-token": ("{}", "sbp_" + "0a" * 20),
    "supabase-key": ("{}", f"sb_secret_{'a1B2' * 5}cd_{'a1B2' * 2}"),
    "docker-token": ("{}", "dckr_pat_" + "a1B2" * 6 + "cde"),
    "linear-key": ("{}", "lin_api_" + "a1B2" * 10),
    "notion-token": ("{}", "ntn_" + "a1B2" * 11),
    "figma-token": ("{}", "figd_" + "a1B2" * 10),
    "grafana-token": ("{}", f"glsa_{'a1B2' * 8}_{'0a' * 4}"),
    "atlassian-token": ("{}", "ATATT3" + "a1B2" * 40),
    "shopify-token": ("{}", "shpat_" + "0a" * 16),
    "vault-token": ("{}", "hvs." + "a1B2" * 23),
    "doppler-token": ("{}", "dp.pt." + "a1B2" * 10 + "cde"),
    "discord-webhook": ("https://discord.com/api/webhooks/123456789012345678/{}", "a1B2" * 17),
    "bearer-token": ("Authorization: Bearer {}", "a1B2" * 10),
    "url-password": ("postgres://app:{}@db.example.com/x", "correct-horse"),
}
BETWEEN = (
    *((" ", "\n"), ('"', '"'), ("\\n", "\\n"), ("=", ","), ("", "")),
    *(("<b>\\u003e", "\\u003c"), ("\\\\u0022", "\\\\u0022"), ("?a%3D", "%26"), ("\\x3d", "\\x26"), ("\\f", "\\f")),
    *(("\x1b[32m", "\x1b[0m"), ("\\u001b[1;38;5;123m", "\\u001b[m"), ("\x1b[m", "\x1b[m")),
)
"""What is before a credential, and after it, and no part of either."""
HARMLESS = (
    b"task-list risk-free disk-usage ask-me",
    b"sk-hunter2 tok-hunter2 key-hunter2",
    b"git@github.com:owner/repo.git https://example.com:8080/a@b ssh://git@host/x",
    b"postgres://user:$PASSWORD@host postgres://user:<password>@host postgres://user:***@host",
    b"http://localhost:3000?email=bob@example.com http://localhost:3000#a@b docker://alpine:3.19@sha256:" + b"0a" * 32,
    b"redis://:$PASSWORD@host redis://:${PASSWORD}@host a://b:$(PASSWORD)@c a://b:%(password)s@c a://b:...@c",
    b"AKIA is how they begin; so does AKIAABC and XAKIAIOSFODNN7EXAMPLE",
    b"-----BEGIN PUBLIC KEY-----\nMFwwDQYJKoZIhvcNAQEBBQADSwAwSAJBAK\n-----END PUBLIC KEY-----",
    b"it starts with -----BEGIN RSA PRIVATE KEY----- and so on",
    b"eyJhbGciOiJIUzI1NiJ9 alone is no token",
    b"0123456789abcdef" * 8,
    b"sb_secret_access_key_from_the_environment hvs.a_method_with_a_rather_long_name dckr_pat_of_the_one_who_builds_it",
    b"the bearer of https://example.com/a/b/c, Bearer YOUR_ACCESS_TOKEN_GOES_RIGHT_HERE, Bearer $TOKEN, Bearer {token}",
)


def found(text: bytes, *, redact: bool, chance: random.Random | None = None) -> tuple[bytes, list[str]]:
    names: list[str] = []
    stream, out, at = CredentialFilter(redact, lambda line, name: names.append(name)), b"", 0
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
    for before, after in BETWEEN:
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


@pytest.mark.parametrize(
    ("before", "secret", "after"),
    [
        ("redis://:", "hunter22", "@cache:6379/0"),
        ("postgres://bob:", "p4$$w0rd", "@db/x"),
        ("postgres://$USER:", "hunter22", "@$HOST/x"),
        ("postgres://bob:", "hunter22", "@[::1]:5432/x"),
        ("https:\\/\\/bob:", "hunter22", "@example.com\\/x"),
    ],
)
def test_a_password_is_found_in_any_url(before: str, secret: str, after: str) -> None:
    left, names = found(f"{before}{secret}{after}".encode(), redact=True)
    assert (left, names) == (f"{before}[redacted:url-password]{after}".encode(), ["url-password"])
    assert found(left, redact=True) == (left, [])


@pytest.mark.parametrize(
    "token",
    [
        "xapp-1-A0123456789-0123456789012-" + "0a" * 32,
        "xoxc-" + "1234567890-" * 3 + "0a" * 32,
        "xoxd-" + "a1B2%2F" * 9,
        "sk-admin-" + "a1B2" * 30,
        "sk-" + "a1B2" * 12,
        "sk-" + "0a" * 16,
        "sk_test_" + "a1B2" * 6,
        "Bearer ghp_" + "a1B2" * 9 + ".",
        f"authorization: bearer eyJ{'a1B2' * 8}.eyJ{'a1B2' * 20}.{'a1B2' * 10}.",
        "rk_test_" + "a1B2" * 6,
        "glrt-" + "a1B2" * 5,
        "aws_secret_access_key => '" + "a1B2" * 10,
        "aws_secret_access_key\\u003d" + "a1B2" * 10,
    ],
)
def test_every_prefix_of_a_vendor_is_known(token: str) -> None:
    assert len(found(token.encode(), redact=True)[1]) == 1


def key_of(lines: list[str], kind: str = "RSA PRIVATE KEY") -> list[str]:
    return [f"-----BEGIN {kind}-----", *lines, f"-----END {kind}-----"]


def base64_lines(count: int, width: int = 64) -> list[str]:
    chance = random.Random(count)
    return ["".join(chance.choices(LETTERS + "+/", k=width)) for _ in range(count)]


HEADERS = ["Proc-Type: 4,ENCRYPTED", "DEK-Info: AES-256-CBC,0A0B", ""]


@pytest.mark.parametrize(
    ("prefix", "lines", "line_end"),
    [
        ("    ", base64_lines(25), "\n"),
        (" " * 16, base64_lines(25), "\r\n"),
        ("> ", [*HEADERS, *base64_lines(25)], "\n"),
        ("", base64_lines(80, 20), "\n"),
        ("", [*base64_lines(1500), "=aB3d"], "\n"),
        ("", base64_lines(25), " "),
        ("", base64_lines(25), "\\n"),
        ("  # ", [*base64_lines(25), "ab=="], "\\\\r\\\\n"),
    ],
)
def test_a_key_goes_whole_however_its_lines_are_set(prefix: str, lines: list[str], line_end: str) -> None:
    """With its last line, and without it as far as there are lines of a key."""
    whole = line_end.join(f"{prefix}{line}" for line in key_of(lines))
    mark = f"{prefix}[redacted:private-key]"
    for chance in (None, random.Random(1)):
        assert found(f"a\n{whole}\nb".encode(), redact=True, chance=chance)[0].decode() == f"a\n{mark}\nb"
        assert found(f'["{whole}", "b"]'.encode(), redact=True, chance=chance)[0].decode() == f'["{mark}", "b"]'
        cut = whole[: whole.rindex(f"{line_end}{prefix}-----")]
        assert found(f"a\n{cut}\n\nAnd so it\ngoes on.".encode(), redact=True, chance=chance)[0].decode() == (
            f"a\n{mark}\n\nAnd so it\ngoes on."
        )


@pytest.mark.parametrize(
    "between",
    [
        '","certificateAuthority":"acme","pem_footer":"',
        '"\n\ndef load(path):\n    return open("/etc/ssl/private/keys")\n\nTAIL = "',
        " Ours is in /etc/ssl/private/server.\n## Notes: we meet on Monday.\nIt ends with ",
    ],
)
def test_a_text_about_keys_stays(between: str) -> None:
    text = f"x -----BEGIN PRIVATE KEY-----{between}-----END PRIVATE KEY----- y".encode()
    assert found(text, redact=True)[0] == text


@pytest.mark.parametrize("after", ["\nprose and the\nnext one\n\nAnother paragraph.", '", "b": "c"}', "\n", ""])
def test_what_follows_the_beginning_of_a_key_stays(after: str) -> None:
    text = f"-----BEGIN RSA PRIVATE KEY-----\n{base64_lines(1, 36)[0]}{after}"
    assert found(text.encode(), redact=True)[0].decode() == f"[redacted:private-key]{after}"


def test_many_beginnings_of_keys_take_no_longer_than_other_text() -> None:
    text = b"-----BEGIN RSA PRIVATE KEY----- is how it begins\n" * 20_000
    assert found(text, redact=True) == (text, [])
