"""What is read out of the files of a memory, part by part."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.records.claude_mem import join_items
from sidecar.records.codymaster import read_file
from sidecar.records.markdown import read_sections, split_sections
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


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", [((), "")]),
        ("just words", [((), "just words")]),
        ("# A\nx\n## B\ny\n# C\nz", [((), ""), (("A",), "x"), (("A", "B"), "y"), (("C",), "z")]),
        ("### Deep\nx\n# Top\ny", [((), ""), (("Deep",), "x"), (("Top",), "y")]),
        ("# A #\n## B ## \n# C#\n#D", [((), ""), (("A",), ""), (("A", "B"), ""), (("C#",), "#D")]),
        ("---\ntitle: x\n# no\n---\nbody\n# A", [((), "body"), (("A",), "")]),
        ("---\nnever closed\n# A", [((), "---\nnever closed"), (("A",), "")]),
        ("---\n## Monday\nx\n---\n## Tuesday", [((), "---"), (("Monday",), "x\n---"), (("Tuesday",), "")]),
        ("---\n\nwords\n---\n# A", [((), "---\n\nwords\n---"), (("A",), "")]),
        ("```sh\n# no\n```\n# yes", [((), "```sh\n# no\n```"), (("yes",), "")]),
        ("~~~~\n# no\n~~~\n# no\n~~~~\n# yes", [((), "~~~~\n# no\n~~~\n# no\n~~~~"), (("yes",), "")]),
        ("``` not code ```\n# yes", [((), "``` not code ```"), (("yes",), "")]),
        ("    # code\n   # yes\n#\tyes", [((), "    # code"), (("yes",), ""), (("yes",), "")]),
        ("####### seven\n#\n## B", [((), "####### seven"), (("",), ""), (("", "B"), "")]),
        ("# A\r\nx\r\n# B", [((), ""), (("A",), "x"), (("B",), "")]),
    ],
)
def test_sections_of_markdown(text: str, found: list[tuple[tuple[str, ...], str]]) -> None:
    assert list(split_sections(text)) == found


def test_a_byte_order_mark_hides_no_heading_and_no_front_matter(tmp_path: Path) -> None:
    for text, titles in (("# A\nx", ["A"]), ("---\ntitle: x\n---\n# A", ["A"]), ("words", ["a.md"])):
        (tmp_path / "a.md").write_text(text, encoding="utf-8-sig")
        found = list(read_sections(str(tmp_path / "a.md"), "project/memory/a.md", "", 0))
        assert [one.title for one in found] == titles and "\ufeff" not in found[0].text


def test_two_learnings_with_one_id_are_two(tmp_path: Path) -> None:
    file = tmp_path / "learnings.json"
    file.write_text(json.dumps([{"id": "L1", "whatFailed": "a"}, {"id": "L1", "whatFailed": "b"}, {"id": "L2"}]))
    found = list(read_file(str(file), "cm/memory/learnings.json", ""))
    assert [(one.key, one.title) for one in found] == [("cm/L1", "a"), ("cm/L1#2", "b"), ("cm/L2", "")]


@given(st.text(alphabet="# \t\n-`~ab›", max_size=80))
def test_no_word_of_a_markdown_text_is_lost(text: str) -> None:
    said = "".join(body + "".join(headings[-1:]) for headings, body in split_sections(text))
    assert sorted(said.replace("#", "").split()) or not text.replace("#", "").split()
    assert said.count("a") + said.count("b") == text.count("a") + text.count("b")


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
