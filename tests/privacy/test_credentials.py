"""Credentials are found by their looks or their names, wherever a text is cut; what only resembles them is left alone."""

from __future__ import annotations

import json
import random
import re
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from sidecar.program.privacy import assignments
from sidecar.program.privacy.credentials import (
    LAST_LETTERS,
    CredentialFilter,
    choose_spans,
    find_spans,
    find_traces,
    may_hold,
    read_rules,
    redact_name,
)
from sidecar.program.privacy.kinds import TOKENS
from tests.parts.regex_samples import make_sample
from tests.parts.secret_kinds import KINDS, NOT_LOOKED_FOR, Planting
from tests.parts.secret_trees import CREDENTIALS, LETTERS

pytestmark = pytest.mark.usefixtures("forked_programs")

UUID = "0a1b2c3d-0a1b-4c3d-8e4f-0a1b2c3d4e5f"
OTHERS = {
    "aws-secret-key": ('aws_secret_access_key = "{}"', "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEYxx"),
    "slack-webhook": ("https://hooks.slack.com/services/{}", "T0123456/B0123456/" + "a1B2" * 6),
    "telegram-token": ("123456789{}", ":AA" + "a1B" * 11),
    "azure-key": ("AccountName=x;AccountKey={};", "a1B2" * 21 + "ab=="),
    "azure-secret": ("{}", "a1B8Q~" + "a1B2" * 8 + "cd"),
    "jwt": ("{}", f"eyJ{'a1B2' * 8}.eyJ{'a1B2' * 20}.{'a1B2' * 10}"),
    "discord-token": ("{}", f"M{'a1B2' * 6}.{'a1B2c3'}.{'a1B2' * 9}cd"),
    "discord-webhook": ("https://discord.com/api/webhooks/123456789012345678/{}", "a1B2" * 17),
    "bearer-token": ("Authorization: Bearer {}", "a1B2" * 10),
    "url-password": ("postgres://app:{}@db.example.com/x", "correct-horse"),
    "url-token": ("https://{}@o1.ingest.example.com/1", "0a" * 16),
    "basic-auth": ("Authorization: Basic {}", "YXBwOmh1bnRlcjIyMjI="),
    "cookie": ("Cookie: {}", "a=b; sid=" + "0a1B" * 8),
    "password": ('"password": "{}"', "hunter2hunter2"),
    "secret": ("client_secret: '{}'", "a1B2" * 8),
    "api-key": ("X-API-Key: {}", "a1B2" * 8),
    "token": ("DEPLOY_TOKEN={}", "a1B2" * 8),
    "signed-url": ("https://x/y?sv=1&sig={}&se=2", "a1B2" * 10 + "abc%3D"),
    "private-key": ("{}", CREDENTIALS["private-key"](random.Random(1))),
    "newrelic-key": ("{}", "0a" * 18 + "NRAL"),
    "twilio-key": ("{}", "SK" + "0a" * 16),
    "firebase-key": ("AAAA1234567:{}", "APA91b" + "a1B2" * 30),
    "airtable-token": ("{}", f"pat{'a1' * 7}.{'0a' * 32}"),
    "terraform-token": ("{}", f"{'a1' * 7}.atlasv1.{'a1B2' * 16}"),
    "aws-session-token": ("{}", "IQoJb3JpZ2lu" + "a1B2" * 30),
    "authorization": ("Authorization: token {}", "0a1b2c3d" * 5),
    "facebook-token": ("{}", "EAAC" + "a1B2" * 30),
    "easypost-key": ("{}", "EZAK" + "a1B2" * 13 + "cd"),
    "teams-webhook": ("https://x.office.com/webhookb2/{}", f"{UUID}@{UUID}/IncomingWebhook/{'0a' * 16}/{UUID}"),
}  # fmt: skip
BETWEEN = (
    *((" ", "\n"), ('"', '"'), ("\\n", "\\n"), ("=", ","), ("", "")),
    *(("<b>\\u003e", "\\u003c"), ("\\\\u0022", "\\\\u0022"), ("?a%3D", "%26"), ("\\x3d", "\\x26"), ("\\f", "\\f")),
    *(("a _", " _"), ("\x1b[32m", "\x1b[0m"), ("\\u001b[1;38;5;123m", "\\u001b[m"), ("\x1b[m", "\x1b[m")),
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
    # Placeholders.
    b'password = "changeme"\npassword: <your-password>\nDB_PASSWORD=${DB_PASSWORD}\nDB_PASSWORD=$DB_PASSWORD',
    b"PASSWORD=xxxxxxxx\npassword: ********\nAPI_KEY=your-api-key-1234567890\ntoken: {{ vault_token_2024 }}",
    b'{"password": "password", "token": "string", "secret": null, "api_key": "<API_KEY_1234567890>"}',
    b"Password: required\nPassword: unknown\n'password': 'github_token', \"Password\": \"Password\"",
    b"password: %(password)s\nsecret = f'{prefix}_{number}_secret1'\napi_key=REPLACE_ME_1234567890abcdef",
    # Code.
    b'password = os.environ["DB_PASSWORD"]\ntoken = getpass.getpass()\nsecret = settings.SECRET_KEY_2',
    b"def login(password: str, token: Optional[str] = None, api_key: SecretStr = Field(...)) -> None: ...",
    b"apiKey: process.env.API_KEY_1, password: passwordSchema, token: tokens[2], secret: this.secret2,",
    b"self.token = token1\npassword=password2, token = next_token_2024_v2\nPRIVATE_KEY = testRSA2048PrivateKey",
    b'if password == "": raise\nname="password" type="password" autocomplete="current-password1"',
    b"export PWD=/home/agent/project1 OLDPWD=/tmp/x1234567 TOKEN_FILE=/run/secrets/token1 PASSWORD_FILE=./pw/one2three",
    b'"AWS::IAM::AccessKey": "62d91b17309e76c8", "arn:aws:secretsmanager:us-east-1:123456789012:secret:prod/db-AbC123"',
    # What agents' own files are full of.
    b'{"usage":{"input_tokens":12345678,"cache_creation_input_tokens":2345678},"max_tokens": 40961234}',
    b'{"nextPageToken":"CAUQAA0a1B2c3D4e5F","progressToken":"0a1b2c3d-0a1b-4c3d-8e4f-0a1b2c3d4e5f"}',
    b'{"signature":"EqQBCkYIARgCKkDa1B2c3D4e5F6g7H8i9J0", "sessionId": "0a1b2c3d-0a1b-4c3d-8e4f-0a1b2c3d4e5f"}',
    b'"token": "color-primary-500", secret: db-credentials-2, tokens: 128000, "key": "a1b2c3d4e5f6a7b8c9d0"',
    b"Set-Cookie: name=value; Path=/\nCookie: theme=dark; lang=en\nAuthorization: Basic auth is used here",
    b"--- PASS: TestAddrStringAllocs/ipv4 (0.00s)\nPASS: Test2\nkey-value cache-key-" + b"0a" * 16 + b" a-sdk-0a",
    b"docker run -u 1000:1000 x; curl -u user:$PASSWORD https://x; mysqldump --password --user app2024; --token TOKEN",
)


def found(text: bytes, *, redact: bool, chance: random.Random | None = None) -> tuple[bytes, list[str]]:
    names: list[str] = []
    stream, out, at = CredentialFilter(redact, lambda line, name: names.append(name)), b"", 0
    while chance is not None and at < len(text):
        size = chance.choice((1, 40, 1000, 40_000))
        out, at = out + stream.feed(text[at : at + size]), at + size
    return out + stream.feed(text[at:], True), names


def tokens() -> Iterator[tuple[str, str]]:
    """Each kind of token, with each of its beginnings."""
    for beginning, kinds in TOKENS.items():
        for number, (name, rest) in enumerate(kinds):
            text = make_sample(rest.text.decode(), random.Random(f"{beginning.decode()}{number}"))
            yield name, f"{'a1' * 7}." * (name == "terraform-token") + beginning.decode() + text


@pytest.mark.parametrize(
    ("name", "around", "secret"),
    [
        *((name, "{}", secret) for name, secret in tokens()),
        *((name, around, secret) for name, (around, secret) in OTHERS.items()),
    ],
)
def test_each_kind_is_found_and_blotted_out(name: str, around: str, secret: str) -> None:
    for before, after in BETWEEN:
        if after == "%26" and (secret.startswith("xoxd-") or around != "{}"):
            continue  # that might be a part of it
        text = f"{before}{around.format(secret)}{after}".encode()
        assert may_hold(text)
        assert found(text, redact=False) == (text, [name]), text
        left, names = found(text, redact=True)
        assert names == [name]
        assert left == f"{before}{around.format(f'[redacted:{name}]')}{after}".encode()
        assert found(left, redact=True) == (left, [])


def test_what_is_searched_for_quickly_fits_the_names() -> None:
    assert {*assignments._BY_END, b"ass"} == LAST_LETTERS


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.name not in NOT_LOOKED_FOR], ids=lambda kind: kind.name
)
def test_each_planted_kind_is_found_as_people_write_it(kind: Planting) -> None:
    """In text, in JSON, and in JSON in JSON, which stay what they are."""
    missed = 0
    for number in range(40):
        text, secret = kind.plant(random.Random(f"{kind.name} {number}"))
        written = [text, json.dumps({"content": text}), json.dumps({"content": json.dumps({"output": text})})]
        for one in written:
            left = found(one.encode(), redact=True)[0].decode()
            missed += _holds(left, secret)
            assert found(left.encode(), redact=True)[0].decode() == left
            if one is not text:
                json.loads(left)
    # A few passwords look like words, and a few tokens like names.
    assert missed <= 3


def _holds(text: str, secret: str) -> bool:
    """Whether a telling part of a secret is in a text."""
    parts = [part for line in secret.split("\n") for part in re.findall(r"[A-Za-z0-9]{8,}", line)]
    return any(part in text for part in parts or [secret])


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


def test_secrets_with_names_are_found_across_pieces() -> None:
    kinds = [kind for kind in KINDS if kind.name not in NOT_LOOKED_FOR]
    for seed in range(40):
        chance = random.Random(seed)
        planted = [kind.plant(chance) for kind in chance.choices(kinds, k=6)]
        text = "\n\n".join("x" * chance.choice((1, 5000, 90_000)) + "\n" + one for one, _ in planted).encode()
        whole = found(text, redact=True)
        assert found(text, redact=True, chance=chance) == whole and len(whole[1]) >= 5


def test_lines_are_those_of_the_result() -> None:
    lines: list[tuple[int, str]] = []
    token, key = CREDENTIALS["github-token"](random.Random(1)), CREDENTIALS["private-key"](random.Random(1))
    text = f"a\n{key}\nb\n{token} {token}\nDB_PASSWORD=hunter22\n".encode()
    CredentialFilter(True, lambda line, name: lines.append((line, name))).feed(text, True)
    assert lines == [(2, "private-key"), (4, "github-token"), (4, "github-token"), (5, "password")]


def test_in_binary_data_a_mark_has_as_many_bytes() -> None:
    token = CREDENTIALS["github-token"](random.Random(1)).encode()
    data = b"\0\1" + token + b"\0" + b"password=s3cr3t\0\2"
    left = CredentialFilter(True, lambda line, name: None, keep_length=True).feed(data, True)
    assert left == b"\0\1" + b"[redacted:github-token]".ljust(len(token), b"*") + b"\0password=******\0\2"
    assert CredentialFilter(True, lambda line, name: None, keep_length=True).feed(left, True) == left


def test_a_rule_of_ones_own_is_applied_where_its_keyword_is() -> None:
    rules = read_rules(
        [["staff-id", "Staff", r"staff-([0-9]{6})(?![0-9])", "12"], ["codename", "blue", "blue(?:bird|jay)", "8"]]
    )
    names: list[str] = []
    text = b"STAFF-123456 staff-123456, staff-1234567 and a bluebird, a bluejay, blueberries"
    left = CredentialFilter(True, lambda line, name: names.append(name), rules).feed(text, True)
    expected = (b"STAFF-123456 staff-[redacted:staff-id], staff-1234567 and", b"[redacted:codename]")
    assert left == expected[0] + b" a %b, a %b, blueberries" % (expected[1], expected[1])
    assert names == ["staff-id", "codename", "codename"] and may_hold(text, rules) and not may_hold(text)


def test_a_name_of_a_file_is_no_assignment() -> None:
    assert redact_name("notes/password=hunter22.md") == ("notes/password=hunter22.md", [])
    token = CREDENTIALS["github-token"](random.Random(1))
    assert redact_name(f"notes/{token}.md") == ("notes/[redacted:github-token].md", ["github-token"])


def test_what_a_text_of_signs_costs_does_not_explode() -> None:
    """Each of these has a candidate at every byte or two."""
    for piece in (
        b"password=",
        b"a_b-c.d:e=f/",
        b"://a:",
        b"token: ",
        b"eyJ.eyJ.",
        b"cookie: a=b; ",
        b"--token --",
        b"'] = '",
    ):
        text = piece * (400_000 // len(piece))
        assert len(list(find_spans(text))) >= 0


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


def test_ordinary_code_and_prose_is_left_alone() -> None:
    """Of installed libraries, whose few findings are samples of secrets in their documentation."""
    folders = [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib"))]
    files = (
        file
        for folder in folders
        for file in sorted(folder.rglob("*"))
        if file.suffix in (".py", ".md", ".txt", ".json")
    )
    found = [span for file in islice(files, 3000) for span in choose_spans(find_spans(file.read_bytes()))]
    assert len(found) <= 40, found


def test_what_is_found_has_traces_also_within_more() -> None:
    """In a page of a database other values stand on both sides."""
    texts = [(name, around.format(secret)) for name, (around, secret) in OTHERS.items()]
    texts.append(("a token that goes on with a hyphen", "GOC" + "SPX--6Z6ZCQ90fwMhalBMzb0HUV6M6mk"))
    texts += list(tokens()) + [(kind.name, kind.plant(random.Random(kind.name))[0]) for kind in KINDS]
    for name, text in texts:
        if any(True for _ in find_spans(text.encode())):
            for before, after in ((b"", b""), (b"github", b"hub"), (b"7_", b"(9"), (b"\0", b"\1")):
                within = range(len(before), len(before) + len(text.encode()))
                assert any(at in within for at, _ in find_traces(before + text.encode() + after)), (name, before)
