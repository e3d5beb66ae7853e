"""What is read again although only a part of it changed: whatever a look at all of it finds, a look at what is new finds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sidecar.format.digests import AT_ONCE
from sidecar.format.index import FILE, Entry
from sidecar.program.cache import KnownEntry
from sidecar.program.capture.reader import Contents, read_changing_file
from sidecar.program.privacy.scrub import REDACT, WARN, PrivacyPolicy, Watch
from tests.parts.secret_kinds import KINDS

BLOCK = 64 * 1024
POLICY = PrivacyPolicy(True, REDACT)
WORDS = b"the agent wrote that it had read what was said and went on to the next of its tasks \n".split()
KEY = b"-----BEGIN RSA PRIVATE KEY-----\n" + b"MIIEpAIBAAKCAQEA7bq0Zk3x9YtWc5mQh2Lr8vNfJ1sDpKaEuGzTiOxV\n" * 12
PIECES = [
    b"<private>",
    b"</private>",
    b"\\u003cprivate\\u003e",
    b"the <private> tag",
    KEY[:40],
    KEY[40:],
    b'"<private>"',
]


def read(place: Path, data: bytes, known: KnownEntry | None, watch: Watch) -> Contents:
    place.write_bytes(data)
    contents = read_changing_file(str(place), known, str(place.parent), watch)
    contents.carried.close()
    return contents


def remember(contents: Contents) -> KnownEntry:
    entry = Entry("p/x", FILE, 0o600, contents.size, 0, contents.digest, contents.block, contents.sums)
    return KnownEntry(entry, [1, 2, 3, 4, 5])


def write_text(chance: random.Random, size: int) -> bytes:
    return b" ".join(chance.choices(WORDS, k=size // 5))[:size]


@pytest.mark.parametrize("seed", range(12))
def test_what_is_new_is_seen_wherever_it_is(tmp_path: Path, seed: int) -> None:
    chance, secrets = random.Random(seed), [kind.plant(random.Random(seed))[0].encode() for kind in KINDS]
    found = 0
    for _ in range(25):
        before = write_text(chance, chance.randrange(BLOCK, 12 * BLOCK))
        if chance.random() < 0.3:
            at = chance.randrange(len(before))
            before = before[:at] + chance.choice(PIECES) + before[at:]
        edge = BLOCK * chance.randrange(1 + len(before) // BLOCK) + chance.randrange(-600, 600)
        at = chance.choice([len(before), chance.randrange(len(before)), max(0, min(edge, len(before)))])
        piece = chance.choice([chance.choice(secrets), chance.choice(PIECES)])
        later = before[:at] + b"\n" * chance.randrange(2) + piece + before[at + len(piece) * chance.randrange(2) :]
        known = remember(read(tmp_path / "x", before, None, Watch(POLICY)))
        whole, part = Watch(POLICY), Watch(POLICY, looked_at=True)
        read(tmp_path / "x", later, known, whole)
        read(tmp_path / "x", later, known, part)
        assert part.hit or not whole.hit
        found += whole.hit
    assert found > 3


def test_a_key_is_seen_when_its_end_is_appended(tmp_path: Path) -> None:
    begun = write_text(random.Random(1), 3 * BLOCK) + b"\n" + KEY[:33]
    for between in (0, BLOCK, 100_000):
        before = begun + b" " * between + write_text(random.Random(2), 3 * BLOCK)
        known = remember(read(tmp_path / "x", before, None, Watch(POLICY)))
        part = Watch(POLICY, looked_at=True)
        read(tmp_path / "x", before + KEY[33:], known, part)
        assert part.hit


def test_a_passage_is_seen_when_its_end_is_appended(tmp_path: Path) -> None:
    before = b"- a <private> tag, they said. " + write_text(random.Random(3), 9 * BLOCK)
    known = remember(read(tmp_path / "x", before, None, Watch(POLICY)))
    part = Watch(POLICY, looked_at=True)
    read(tmp_path / "x", before + b"</private>", known, part)
    assert part.hit


def test_what_is_only_warned_about_is_warned_about_again(tmp_path: Path) -> None:
    policy = PrivacyPolicy(False, WARN)
    before = KINDS[0].plant(random.Random(4))[0].encode() + b"\n" + write_text(random.Random(4), 9 * BLOCK)
    known = remember(read(tmp_path / "x", before, None, Watch(policy)))
    part = Watch(policy, looked_at=True)
    read(tmp_path / "x", before + b"more", known, part)
    assert part.hit


def test_what_is_as_it_was_is_not_looked_through_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    look = PrivacyPolicy.may_concern
    monkeypatch.setattr(
        PrivacyPolicy,
        "may_concern",
        lambda policy, data: (policy.credentials == REDACT and looked.append(len(data))) or look(policy, data),
    )
    before = write_text(random.Random(5), 64 * BLOCK)
    known = remember(read(tmp_path / "x", before, None, Watch(POLICY)))
    looked.clear()
    part = Watch(POLICY, looked_at=True)
    read(tmp_path / "x", before + b"one line more\n", known, part)
    assert not part.hit and 0 < sum(looked) < 6 * BLOCK


@pytest.mark.parametrize("first_half_is_new", [True, False])
def test_what_is_half_new_is_seen(tmp_path: Path, first_half_is_new: bool) -> None:
    chance = random.Random(6)
    seen = 0
    for kind in KINDS:
        text = b"\n" + kind.plant(chance)[0].encode() + b"\n"
        cut = chance.randrange(2, len(text) - 2)
        start = AT_ONCE * chance.randrange(1, 3) - cut
        filler = write_text(chance, 4 * AT_ONCE)
        later = filler[:start] + text + filler[start + len(text) :]
        half = slice(start, start + cut) if first_half_is_new else slice(start + cut, start + len(text))
        before = later[: half.start] + filler[half] + later[half.stop :]
        first = Watch(POLICY)
        known = remember(read(tmp_path / "x", before, None, first))
        whole, part = Watch(POLICY), Watch(POLICY, looked_at=True)
        read(tmp_path / "x", later, known, whole)
        read(tmp_path / "x", later, known, part)
        assert part.hit or not whole.hit, kind.name
        seen += whole.hit and not first.hit
    assert seen > len(KINDS) // 3
