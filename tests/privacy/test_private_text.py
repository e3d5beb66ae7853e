"""What is private leaves a text, whatever form its tags have and however the text is cut into pieces."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.program.privacy.passages import MARK, MENTIONED, PrivateFilter, holds_json, is_json, may_hold
from tests.parts.private_model import without_private

PIECES = (
    *(
        b"<private>",
        b"</private>",
        b"<PRIVATE>",
        b"< Private >",
        b'<private a=\\"b\\">',
        b'<private a="b">',
        b"<private ",
        b"<",
    ),
    *(
        b"\\u003cprivate\\u003e",
        b"\\\\u003cprivate\\\\u003e",
        b"<\\/private>",
        b"\\u003c/private\\u003E",
        b"</ private\n>",
    ),
    *(
        b"\\\\u003c\\\\/private\\\\u003e",
        b"private",
        b">",
        b"\\",
        b"\\\\",
        b'"',
        b'"',
        b'\\"',
        b"\n",
        b"secret",
        b'{"a": "',
        b'", "b": "',
        b'"}\n',
        b'" ' + b" " * 64 + b"}",
    ),
    *(b"[private]", b" x ", b"\\n", b"<private\\n>", b"<private-key>", b"u003c", b"\\u003c", b"q" * 900, b"q" * 8100),
    *(b"<private\f", b"<" + b" " * 40),
    *(
        b"`<private>`",
        b'\\"<private>\\"',
        b"<private> tags",
        b"\n\n",
        b"\\n\\n",
        b"\n- ",
        b"\r\n> ",
        b"\\n1. ",
        b"`",
        b" tags",
    ),
)


def scrubbed(text: bytes, *, json: bool = False, chance: random.Random | None = None) -> bytes:
    """In one piece, or in random ones."""
    found: list[int] = []
    stream, out, at = PrivateFilter(json, lambda line, name: found.extend([line] * (name != MENTIONED))), b"", 0
    while chance is not None and at < len(text):
        size = chance.choice((1, 2, 3, 7, 20, 100, 2000))
        out, at = out + stream.feed(text[at : at + size]), at + size
    out += stream.feed(text[at:], True)
    assert len(found) == without_private(text, json)[1]
    return out


@pytest.mark.parametrize("first", (0, 1000))
def test_it_does_as_the_model_does_in_whatever_pieces_it_reads(first: int) -> None:
    for seed in range(first, first + 250):
        chance = random.Random(seed)
        text = b"".join(chance.choices(PIECES, k=chance.randint(1, 40)))
        as_json = chance.random() < 0.6
        left = scrubbed(text, json=as_json, chance=chance)
        assert left == without_private(text, as_json)[0], (seed, text)
        assert scrubbed(left, json=as_json, chance=chance) == left, (seed, text)
        if left != text:
            assert may_hold(text)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a <private>b</private> c", "a [private] c"),
        ("a <PRIVATE>b</Private> c", "a [private] c"),
        ('a <private why="x">b</private > c', "a [private] c"),
        ("<private>a<private>b</private>c</private>d", "[private]d"),
        ("a <private>b <private>c</private> d", "a [private]"),
        ("a <private>b\nc", "a [private]"),
        ("a </private> b", "a </private> b"),
        ("<privateer>a</privateer> private <private", "<privateer>a</privateer> private <private"),
        ("a \\u003cprivate\\u003eb\\u003c/private\\u003e c", "a [private] c"),
        ("", ""),
        (f"a <private why='{'x' * 9000}'>b</private> c", "a [private] c"),
        ('a <private why="1<2">b</private> c', "a [private] c"),
        ('a <private why="see [private] note">b</private> c', "a [private] c"),
        ("a <      private>b</      private      > c", "a [private] c"),
        (f"a <{' ' * 64}private>b</private> c", "a [private] c"),
        (
            "a <private\fx>b</private> <private\f>c</private\f>\\u003cprivate\\f>d</private>",
            "a [private] [private][private]",
        ),
        ("a <private b</private> c", "a [private] c"),
        ("a <private b", "a [private]"),
        # Only mentioned.
        ("Use `<private>` tags.\nMore.\n\nRest.", "Use `<private>` tags.\nMore.\n\nRest."),
        ("Use <private> tags.\nMore.\n\nRest.", "Use <private> tags.\nMore.\n\nRest."),
        ("<private> tags hide it.\n\nRest.", "<private> tags hide it.\n\nRest."),
        ("From \"<private>\" to '</private>'.", "From \"<private>\" to '</private>'."),
        ("`<private>` and <private>a</private> b", "`<private>` and [private] b"),
        ("<private> tags and <private>a</private> b", "<private> tags and [private] b"),
        # Mentioned or meant, which cannot be told: a paragraph goes.
        ("Put it in <private> then.\nMore.\n\nRest.", "Put it in [private]\n\nRest."),
        ("- in <private> then,\n- as I said.\n# Rest", "- in [private]\n- as I said.\n# Rest"),
        ("a <private> b <private>c\n\nd</private> e\n\nf", "a [private]\n\nf"),
        # Meant, and cut off.
        ("a\n<private>b\n\nc", "a\n[private]"),
        ("a\n  - <private>b\n\nc", "a\n  - [private]"),
        ("a\n> <private>\nb\n\nc", "a\n> [private]"),
        ("<private> tags: b</private> c", "[private] c"),
    ],
)
def test_a_text_without_what_is_private(text: str, left: str) -> None:
    assert scrubbed(text.encode()).decode() == left


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('{"a": "x <private>b", "c": "d"}', '{"a": "x [private]", "c": "d"}'),
        ('{"a": "<private>b\\" c", "d": 1}', '{"a": "[private]", "d": 1}'),
        ('{"a": "<private>b", "c": "d</private>"}', '{"a": "[private]", "c": "d</private>"}'),
        ('{"a": "C:\\\\\\u003cprivate>b</private>"}', '{"a": "C:\\\\[private]"}'),
        ('{"a": "{\\"b\\": \\"<private>c<\\/private>d\\"}"}', '{"a": "{\\"b\\": \\"[private]d\\"}"}'),
        (
            '{"a": "{\\"b\\": \\"\\\\u003cprivate\\\\u003ec\\\\u003c/private\\\\u003ed\\"}"}',
            '{"a": "{\\"b\\": \\"[private]d\\"}"}',
        ),
        ('{"a": "<private", "b": ">"}', '{"a": "<private", "b": ">"}'),
        ('{"a": "<private x", "b": ">"}', '{"a": "[private]", "b": ">"}'),
        ('{"a": "x <private>b "c" d</private> e', '{"a": "x [private] e'),
        ('{"a": "x <private>b", c</private> e', '{"a": "x [private] e'),
        (
            '{"a": ["<private>b"\n, "<private>c" ], "d": "<private>e"}',
            '{"a": ["[private]"\n, "[private]" ], "d": "[private]"}',
        ),
        ('{"a": "<private\\u0020x>b</private> c"}', '{"a": "[private] c"}'),
        ('{"a": "<\nprivate>b</private> c', '{"a": "[private] c'),
        ('{"a": "<private>b\nno JSON at all</private> c', '{"a": "[private] c'),
        (
            '{"a": "use <private> tags\\n\\nb", "c": "</private>"}',
            '{"a": "use <private> tags\\n\\nb", "c": "</private>"}',
        ),
        ('{"a": "use <private> so\\n\\nb", "c": "d"}', '{"a": "use [private]", "c": "d"}'),
        ('{"a": "\\"<private>\\" opens", "c": "<private>"}', '{"a": "\\"<private>\\" opens", "c": "<private>"}'),
    ],
)
def test_json_stays_json(text: str, left: str) -> None:
    got = scrubbed(text.encode(), json=True).decode()
    assert got == left
    if got.endswith("}"):
        json.loads(got)


def test_a_block_is_found_across_the_pieces_of_a_long_text() -> None:
    stream, out = PrivateFilter(False, lambda line, closed: None), 0
    for _ in range(16):
        out += len(stream.feed(b"x" * (1 << 20)))
    out += len(stream.feed(b"<pri")) + len(stream.feed(b"vate>" + b"y" * (2 << 20))) + len(stream.feed(b"z</priv"))
    out += len(stream.feed(b"ate>", True))
    assert out == (16 << 20) + len(MARK)


def test_how_much_is_held_back_to_see_whether_a_tag_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it, a tag within a line is taken for a long passage, unless it is mentioned."""
    monkeypatch.setattr("sidecar.program.privacy.passages.LOOKAHEAD", 100_000)
    rest = b"x\n\n" * 50_000
    for text, left in (
        (b"a <private>" + rest + b"</private> b", b"a [private] b"),
        (b"a <private>" + rest, b"a [private]"),
        (b"a <private> tags " + rest, b"a <private> tags " + rest),
        (b"a <private>" + rest[:90_000], b"a [private]" + rest[1:90_000]),
    ):
        stream = PrivateFilter(False, lambda line, name: None)
        pieces = [stream.feed(text[at : at + 7000]) for at in range(0, len(text), 7000)]
        assert b"".join([*pieces, stream.feed(b"", True)]) == left


def test_what_is_read_as_json() -> None:
    assert is_json("x.JSONL") and is_json("a/x.json") and not is_json("x.md")
    assert holds_json(b' {"a": 1}\n') and holds_json(b'{"a": "b"}\n\n["c"]\n')
    assert not holds_json(b'[ ] the 12" pipe') and not holds_json(b'["a"] and so on') and not holds_json(b"[" * 100_000)


# Not by ru_maxrss, which begins with what the parent had.
MEASURED = """
import sys
from sidecar.program.privacy.scrub import PrivacyPolicy, scrub_file
text, steady = scrub_file(sys.argv[1], sys.argv[2], PrivacyPolicy(True, "redact"))
with open("/proc/self/status") as status:
    print(text.taken[0], steady, next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("line_break", ["\n", " "])
def test_a_gigabyte_is_read_in_little_memory(line_break: str, tmp_path: Path) -> None:
    """As JSON lines, and as one single line."""
    line = json.dumps({"text": 'what the agent said, "quoted" ' * 2000 + "<private>zqjxkvw</private>"}) + line_break
    count = (1 << 30) // len(line)
    with (tmp_path / "large.jsonl").open("w") as file:
        for _ in range(count):
            file.write(line)
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "large.jsonl"), str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    taken, steady, megabytes = ran.stdout.split()
    assert (int(taken), steady) == (count, "True") and int(megabytes) < 150
    (tmp_path / "large.jsonl").unlink()
    (tmp_path / "out").unlink()
