"""What is read out of the files of a memory, part by part."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.records.columns import join_items
from sidecar.records.files import MemoryFile, Unreadable
from sidecar.records.record import (
    KEY_LENGTH,
    TEXT_BYTES,
    Record,
    bound_key,
    clean_record,
    clean_text,
    cut_text,
    parse_time,
)
from sidecar.records.sections import read_sections, split_pieces
from sidecar.records.units import plan_units


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("just words", [("", "just words")]),
        ("# A\nx\n## B\ny\n# C\nz", [("A", "x"), ("A › B", "y"), ("C", "z")]),
        ("### Deep\nx\n# Top\ny", [("Deep", "x"), ("Top", "y")]),
        ("# A #\n## B ## \n# C#\n#D", [("A", ""), ("A › B", ""), ("C#", "#D")]),
        ("---\ntitle: x\n# no\n---\nbody\n# A", [("---", "title: x\n# no\n---"), ("", "body"), ("A", "")]),
        ("---\nnever closed\n# A", [("", "---\nnever closed"), ("A", "")]),
        ("---\n## Monday\nx\n---\n## Tuesday", [("", "---"), ("Monday", "x\n---"), ("Tuesday", "")]),
        ("---\n\nwords\n---\n# A", [("", "---\n\nwords\n---"), ("A", "")]),
        ("```sh\n# no\n```\n# yes", [("", "```sh\n# no\n```"), ("yes", "")]),
        ("~~~~\n# no\n~~~\n# no\n~~~~\n# yes", [("", "~~~~\n# no\n~~~\n# no\n~~~~"), ("yes", "")]),
        ("``` not code ```\n# yes", [("", "``` not code ```"), ("yes", "")]),
        ("    # code\n   # yes\n#\tyes", [("", "    # code"), ("yes", ""), ("yes", "")]),
        ("####### seven\n#\n## B", [("", "####### seven"), ("", ""), (" › B", "")]),
        ("# A\r\nx\r\n# B", [("A", "x"), ("B", "")]),
        ("Title\n===\nx\n\nSub\n----\ny", [("Title", "x"), ("Title › Sub", "y")]),
        ("a\nb\n---\n\nlong line\n---\n", [("", "a\nb\n---\n\nlong line\n---")]),
        (
            "# A\n- [ ] do\n- [x] did\n  so\n\nend\n",
            [("A", ""), ("- do", "- [ ] do"), ("- did", "- [x] did\n  so"), ("A", "end")],
        ),
    ],
)
def test_sections_of_markdown(text: str, found: list[tuple[str, str]]) -> None:
    data = text.encode()
    assert [(one.identity, data[one.body : one.end].decode()) for one in split_pieces(data)] == found


def test_a_byte_order_mark_hides_no_heading_and_no_front_matter(tmp_path: Path) -> None:
    for text, titles in (
        ("# A\nx", ["A"]),
        ("---\ntitle: x\n---\n# A", ["a.md (front matter)", "A"]),
        ("words", ["a.md"]),
    ):
        (tmp_path / "a.md").write_text(text, encoding="utf-8-sig")
        file = MemoryFile(str(tmp_path / "a.md"), "project/memory/a.md")
        found = [one.build("key") for one in read_sections(file)]
        assert [one.title for one in found] == titles and "\ufeff" not in found[0].text


def read(tmp_path: Path, path: str, text: str | bytes, layout: str) -> list[Record]:
    """The records of one file, read as its layout says."""
    place = tmp_path / path.rpartition("/")[2]
    place.write_bytes(text if isinstance(text, bytes) else text.encode())
    files = {path: MemoryFile(str(place), path)}
    units = plan_units([path], {path.split("/")[0]: layout})
    return [item.build(key) for unit in units.values() for key, item in unit.read_named(files)]


def test_two_learnings_with_one_id_in_one_file_are_one_and_without_ids_two_equal_ones_stay_two(tmp_path: Path) -> None:
    items = [{"id": "L1", "whatFailed": "a"}, {"whatFailed": "b"}, {"whatFailed": "b"}, {"id": "L2", "error": "c"}]
    found = read(tmp_path, "cm/memory/learnings.json", json.dumps({"learnings": items}), "codymaster")
    assert [one.title for one in found] == ["a", "b", "b", "c"]
    assert found[0].key == "cm#L1" and found[3].key == "cm#L2" and found[2].key == f"{found[1].key}#2"


def test_every_source_of_the_built_in_layouts_is_read(tmp_path: Path) -> None:
    rating = {"timestamp": "2026-11-16T10:00:00Z", "rating": 4, "session_id": "s1", "comment": "better"}
    (one,) = read(tmp_path, "pai/LEARNING/SIGNALS/ratings.jsonl", json.dumps(rating) + "\n", "pai")
    assert (one.kind, one.title, one.session) == ("rating", "better", "s1") and one.at and "4" in one.text
    (one,) = read(tmp_path, "pai/LEARNING/ALGORITHM/x.md", "# Learned\ntwo\n# Also\n", "pai")
    assert (one.kind, one.title) == ("learning", "Learned")
    (one,) = read(tmp_path, "pai/WORK/w1/META.yaml", 'title: "Ship it"\nstatus: ACTIVE\n', "pai")
    assert (one.kind, one.title) == ("work", "Ship it")
    (one,) = read(tmp_path, "pai/WORK/w1/ISC.json", json.dumps({"criteria": [{"id": 1, "criterion": "Green"}]}), "pai")
    assert (one.kind, one.title, one.key) == ("criterion", "Green", "pai/WORK/w1/ISC.json#1")
    line = {"uuid": "u1", "type": "user", "message": {"content": [{"type": "text", "text": "hello"}]}}
    (one,) = read(tmp_path, "claude-code/projects/p/s.jsonl", json.dumps(line), "claude-code")
    assert (one.kind, one.text, one.key) == ("message", "hello", "claude-code/projects/p/s.jsonl#u1")
    line = {"timestamp": "2026-11-16T10:00:00Z", "payload": {"content": [{"text": "hi"}]}}
    found = read(tmp_path, "codex/sessions/2026/r.jsonl", f"{json.dumps(line)}\n" * 2, "codex")
    assert [one.text for one in found] == ["hi", "hi"] and found[0].key != found[1].key
    (one,) = read(tmp_path, "cm/cm-tasks.json", json.dumps({"tasks": [{"id": "t1", "title": "Test"}]}), "codymaster")
    assert (one.kind, one.title) == ("task", "Test")
    (one,) = read(
        tmp_path, "mcp-memory/memory.jsonl", '{"type":"entity","name":"otter","observations":["a","b"]}', "mcp-memory"
    )
    assert (one.kind, one.title, one.text) == ("entity", "otter", "a\nb")


def test_a_table_without_its_identity_is_known_by_its_text(tmp_path: Path) -> None:
    place = tmp_path / "old.db"
    with contextlib.closing(sqlite3.connect(place)) as database, database:
        database.execute("CREATE TABLE observations (title TEXT, origin_device_id TEXT, origin_local_id)")
        database.executemany("INSERT INTO observations (title, origin_local_id, origin_device_id) VALUES (?, ?, ?)",
                             [("a", None, None), ("a", None, None), ("b", 7, "box")])  # fmt: skip
    found = read(tmp_path, "claude-mem/claude-mem.db", place.read_bytes(), "claude-mem")
    assert [one.title for one in found] == ["a", "a", "b"]
    assert found[1].key == f"{found[0].key}#2" and found[2].key == "claude-mem/claude-mem.db#box,7"


HOSTILE = {
    "project/memory/headings.md": b"# h\n" * 30_000,
    "project/memory/nul.md": b"\0" * 100_000 + b"\xff\xfe# x\n",
    "cm/memory/learnings.json": b"[" * 200_000,
    "cm/memory/decisions.json": b'{"decisions": ' + b'{"a":' * 100_000,
    "cm/cm-tasks.json": b"[1,2,3",
    "cm/context.db": b"SQLite format 3\0" + b"\xff" * 8192,
    "cm/learnings.json": b"\xff\xfe[]",
}


@pytest.mark.parametrize("path", HOSTILE)
def test_hostile_files_end_in_a_reason_or_in_bounded_records(path: str, tmp_path: Path) -> None:
    layout = "three-tier" if path.startswith("project") else "codymaster"
    try:
        assert len(read(tmp_path, path, HOSTILE[path], layout)) <= 30_000
    except Unreadable as problem:
        assert str(problem)


@given(st.text(alphabet="# \t\n-=`~abx[]›\r", max_size=80))
def test_pieces_of_a_markdown_text_follow_each_other_and_lose_nothing(text: str) -> None:
    data = text.encode()
    pieces = list(split_pieces(data))
    end = pieces[-1].end if pieces else 0
    assert b"".join(data[one.start : one.end] for one in pieces) + data[end:] == data
    assert not data[end:].strip()
    assert all(one.start <= one.line <= one.body <= max(one.end, one.body) for one in pieces)


@given(st.text(), st.integers(0, 40))
def test_a_cut_text_is_its_beginning_in_whole_characters(text: str, most: int) -> None:
    text = clean_text(text)
    short = cut_text(text, most)
    assert text.startswith(short) and len(short.encode()) <= max(most, 0)
    assert short == text or len((short + text[len(short)]).encode()) > most


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_whatever_is_remembered_can_be_stored(text: str) -> None:
    made = clean_record(Record(kind="section", key=text, title=text, text=text, project=text, session=text, path=text))
    for part in (made.key, made.title, made.text, made.project, made.session, made.path):
        assert "\0" not in part
        part.encode()
    assert len(made.digest) == 32


def test_long_parts_are_bounded_and_long_keys_stay_apart() -> None:
    made = clean_record(Record(kind="section", key="k" * 9999, title="t" * 9999, text="記" * 999_999, path="p" * 9999))
    assert len(made.key) == KEY_LENGTH and len(made.title) == 500 and len(made.text.encode()) <= TEXT_BYTES
    assert bound_key("k" * 300 + "a") != bound_key("k" * 300 + "b")
    assert bound_key("k" * KEY_LENGTH) == "k" * KEY_LENGTH


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("1790000000", datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC)),
        ("1790000000000", datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC)),
        ("2026-09-21T16:13:20+02:00", datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC)),
        ("2026-09-21 14:13:20", datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC)),
        ("2026-09-21T14:13:20Z", datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC)),
        *((text, None) for text in ("", "soon", "nan", "inf", "1e400", "-1e18", "9" * 400, "0001-01-01T00:00+14:00")),
    ],
)
def test_times_as_programs_write_them(value: str, found: datetime | None) -> None:
    assert parse_time(value) == found


def test_lists_of_facts_become_lines() -> None:
    assert join_items('["a", "b", null, 3]') == "a\nb\n3"
    assert join_items("[not json") == "[not json"
    assert join_items("[" * 100_000) == "[" * 100_000
    assert join_items("plain") == "plain"
