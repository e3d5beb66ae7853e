"""Secrets of every kind, planted wherever a memory keeps text: what is redacted, and what is said not to be looked for."""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.engine import ExportRequest, RestoreRequest, export, restore
from sidecar.policy.privacy import Privacy
from tests.parts import planted_secrets
from tests.parts.homes import engine_at, write
from tests.parts.in_process import InProcess
from tests.parts.secret_kinds import KINDS, NOT_LOOKED_FOR
from tests.parts.secret_trees import SCHEMA, everything_in

pytestmark = pytest.mark.usefixtures("forked_programs")

STRICT = Privacy(credentials="redact", databases="redact")
SHARE = 0.95

Texts = dict[str, str]
Planted = dict[str, tuple[str, str]]
"""A text for each kind, and the secret in it."""


def in_files(home: Path, texts: Texts) -> None:
    for name, text in texts.items():
        write(home / f"app/memory/{name}.md", f"# {name}\n\nWhat came of it:\n\n{text}\n\nAnd so on.\n".encode())


def in_json_lines(home: Path, texts: Texts) -> None:
    rows = [{"type": "user", "message": {"role": "user", "content": text}} for text in texts.values()]
    write(home / ".claude/projects/-app/one.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())


def in_text(home: Path, texts: Texts) -> None:
    _fill(home, [(text, json.dumps({"facts": text}), None) for text in texts.values()], indexed=False)


def in_blobs(home: Path, texts: Texts) -> None:
    values: list[bytes] = [text.encode() for text in texts.values()]
    _fill(
        home, [("", "", b"\0\1" + value + b"\0" if at % 2 else value) for at, value in enumerate(values)], indexed=False
    )


def in_full_text(home: Path, texts: Texts) -> None:
    _fill(home, [(text, text, None) for text in texts.values()], indexed=True)


def _fill(home: Path, rows: list[tuple[str, str, bytes | None]], *, indexed: bool) -> None:
    place = home / ".claude-mem/claude-mem.db"
    place.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(place)
    connection.executescript(SCHEMA if indexed else SCHEMA.partition("CREATE VIRTUAL")[0])
    connection.executemany("INSERT INTO observations (narrative, facts, extra) VALUES (?, ?, ?)", rows)
    connection.commit()
    connection.close()


def of_our_kinds(place: str) -> Planted:
    return {kind.name: kind.plant(random.Random(f"{place} {kind.name}")) for kind in KINDS}


def of_other_kinds(place: str) -> Planted:
    """Of a list that was not written after what the product looks for."""
    names = planted_secrets.PLANTED
    return {name: planted_secrets.plant(name, random.Random(f"{place} {name}")) for name in names}


@pytest.mark.parametrize("plant", [of_our_kinds, of_other_kinds])
@pytest.mark.parametrize("put", [in_files, in_json_lines, in_text, in_blobs, in_full_text])
async def test_nearly_all_kinds_are_gone_wherever_they_were(
    put: Callable[[Path, Texts], None], plant: Callable[[str], Planted], tmp_path: Path
) -> None:
    planted = plant(put.__name__)
    assert len(planted) >= 82 + 30
    home = tmp_path / "home"
    (home / "app").mkdir(parents=True)
    put(home, {name: text for name, (text, _) in planted.items()})
    engine = engine_at(tmp_path / "store", privacy=STRICT)
    receipt = await export(engine, InProcess(home), ExportRequest(memory="m", projects=(str(home / "app"),)))
    assert receipt.outcome == "committed" and not receipt.skipped

    stored = b"\n".join(data for _, data in everything_in(tmp_path / "store")).lower()
    left = {name for name, (_, secret) in planted.items() if _is_left(secret, stored)}
    assert left <= NOT_LOOKED_FOR | planted_secrets.LEFT and len(left) <= (1 - SHARE) * len(planted), left

    other = tmp_path / "other"
    (other / "app").mkdir(parents=True)
    back = await restore(engine, InProcess(other), RestoreRequest(memory="m", projects=(str(other / "app"),)))
    assert back.outcome == "complete" and back.scrubbed.credentials >= SHARE * len(planted)
    if put is in_json_lines:
        (lines,) = (other / ".claude/projects").rglob("*.jsonl")
        assert len([json.loads(line) for line in lines.read_text().splitlines()]) == len(planted)
    if put in (in_text, in_blobs, in_full_text):
        connection = sqlite3.connect(other / ".claude-mem/claude-mem.db")
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT count(*) FROM observations").fetchone() == (len(planted),)
        connection.close()


def _is_left(secret: str, stored: bytes) -> bool:
    """Whether a telling part of a secret is there, as it is or as a full-text index has it."""
    parts = [part for line in secret.split("\n") for part in re.findall(r"[A-Za-z0-9]{8,}", line.replace("\\n", "\n"))]
    return any(part.lower().encode() in stored for part in parts or [secret])
