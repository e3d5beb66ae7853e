"""Anchors are looked for in two ways, by how often they are there. Both find the same."""

from __future__ import annotations

import random

import pytest

from sidecar.program.privacy import credentials

SECRETS = (
    b"ghp_0123456789abcdefghijABCDEFGHIJ0123456789",
    b"AKIAIOSFODNN7EXAMPLQ",
    b'password = "hunter2-but-longer"',
    b"Authorization: Bearer abcdef0123456789abcdef0123456789",
    b"dapi0123456789abcdef0123456789abcdef",
    b"https://user:s3cr3t-pass@example.com/",
    b"-----BEGIN PRIVATE KEY-----",
)


def _make_text(seed: int, density: float) -> bytes:
    """Return a text with as many anchors as ``density`` says, and some credentials."""
    chance = random.Random(seed)
    anchors = [anchor for anchor, _, _ in credentials._SEARCHES]
    words = [b"memory", b"snapshot", b"carer ", b"tomorrow"]
    text = [chance.choice(anchors if chance.random() < density else words) for _ in range(20_000)]
    for secret in SECRETS:
        text.insert(chance.randrange(len(text)), b"\n" + secret + b"\n")
    return b" ".join(text)


@pytest.mark.parametrize("density", [0.0, 0.001, 0.02, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_rare_and_frequent_anchors_are_found_alike(density: float, seed: int) -> None:
    data = _make_text(seed, density)
    for anchor, expression, _ in credentials._SEARCHES:
        found = list(credentials._iterate_candidates(data, anchor, expression))
        assert found == [match.start() for match in expression().finditer(data)], anchor


@pytest.mark.parametrize("density", [0.0, 0.5])
def test_a_credential_is_found_behind_any_number_of_anchors(density: float) -> None:
    noise = _make_text(9, density).replace(b"\n", b" ")
    noise = b" ".join(word for word in noise.split() if len(word) < 10)
    for secret in SECRETS:
        assert credentials.may_hold(noise + b"\n" + secret + b"\n" + noise), secret
