"""The reader of tarballs: what any honest writer wrote it reads as it was, and anything else it refuses, in bounded time."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from sidecar.format.roots import MOST_PROJECTS, split_number
from sidecar.format.tarballs import BadTarball, Tarball
from tests.parts.hostile_archives import Chance

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
PLAIN = "abcdefghij-_. éß\N{BRAIN}"
Row = tuple[str, bytes, str, bytes]


def names(longest: int) -> some.SearchStrategy[str]:
    part = some.text(PLAIN, min_size=1, max_size=longest).filter(
        lambda text: text not in (".", "..", "") and text.strip(" ")
    )
    return some.lists(part, min_size=1, max_size=6).map("/".join)


members = some.lists(
    some.tuples(
        names(60),
        some.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE]),
        names(40),
        some.binary(max_size=1500),
    ),
    max_size=8,
)


def read(data: bytes, most: int = 1 << 40) -> list[Row]:
    return [
        (member.name, member.type, member.linkname, contents.read())
        for member, contents in Tarball(io.BytesIO(data), most)
    ]


def written(rows: list[Row], format: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format, encoding="utf-8", errors="surrogateescape") as tar:
        for name, kind, link, contents in rows:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link if kind == tarfile.SYMTYPE else ""
            info.size = len(contents) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(contents))
    return out.getvalue()


@given(members, some.sampled_from(sorted(FORMATS)))
@settings(max_examples=80, deadline=None)
def test_what_was_written_is_read_as_it_was(rows: list[Row], format: str) -> None:
    if format == "ustar":  # which has no room for long names
        rows = [row for row in rows if len(row[0].encode()) < 100 and len(row[2].encode()) < 100]
    expected = [
        (name, kind, link if kind == tarfile.SYMTYPE else "", contents if kind == tarfile.REGTYPE else b"")
        for name, kind, link, contents in rows
    ]
    assert read(written(rows, FORMATS[format])) == expected


@pytest.mark.parametrize("format", ["gnu", "oldgnu", "pax", "ustar", "v7"])
def test_what_the_tar_of_this_machine_writes_is_read_as_it_was(format: str, tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file.md").write_bytes(b"x" * 70_000)
    (tmp_path / "a/link").symlink_to("b/file.md")
    (tmp_path / "a/empty").write_bytes(b"")
    packed = subprocess.run(
        ["tar", f"--format={format}", "-cf", "-", "a"], cwd=tmp_path, check=True, capture_output=True
    )
    found = {name: (kind, link, contents) for name, kind, link, contents in read(packed.stdout)}
    assert found == {
        "a": (tarfile.DIRTYPE, "", b""),
        "a/b": (tarfile.DIRTYPE, "", b""),
        "a/b/file.md": (found["a/b/file.md"][0], "", b"x" * 70_000),
        "a/link": (tarfile.SYMTYPE, "b/file.md", b""),
        "a/empty": (found["a/empty"][0], "", b""),
    }


@given(some.binary(max_size=3000) | some.integers(0, 1 << 30).map(lambda seed: Chance(seed).tar()))
@settings(max_examples=200, deadline=None)
def test_whatever_it_is_it_is_read_or_refused_and_never_beyond_its_bound(data: bytes) -> None:
    stream = io.BytesIO(data)
    try:
        for _, contents in Tarball(stream, 20_000):
            while contents.read(1000):
                pass
    except BadTarball:
        pass
    assert stream.tell() <= 20_000


@given(members, some.data())
@settings(max_examples=80, deadline=None)
def test_nothing_that_was_cut_short_is_taken_for_whole(rows: list[Row], data: some.DataObject) -> None:
    whole = written(rows, tarfile.PAX_FORMAT)
    end = len(whole.rstrip(b"\0")) if rows else 0
    cut = data.draw(some.integers(0, max(0, end - end % 512)))
    with pytest.raises(BadTarball):
        read(whole[:cut])


@pytest.mark.parametrize(
    ("name", "is_"),
    [
        ("project", ("project", 0)),
        ("project-2", ("project", 2)),
        ("claude-mem", ("claude-mem", 0)),
        ("claude-mem-12", ("claude-mem", 12)),
        *(
            (name, (name, 0))
            for name in ("project-1", "project-0", "project-02", "project-²", "project-٢", "project--")
        ),
        *((name, (name, 0)) for name in ("-2", "project-", "project-2 ", "project-+2", "project-2_0", "")),
        (f"project-{MOST_PROJECTS}", ("project", MOST_PROJECTS)),
        (f"project-{MOST_PROJECTS + 1}", (f"project-{MOST_PROJECTS + 1}", 0)),
        ("project-" + "9" * 6000, ("project-" + "9" * 6000, 0)),
    ],
)
def test_only_numbers_that_a_root_can_have_are_numbers(name: str, is_: tuple[str, int]) -> None:
    assert split_number(name) == is_


@given(some.text(max_size=30), some.text(max_size=30))
def test_no_name_of_a_root_breaks_it(stem: str, end: str) -> None:
    found, number = split_number(f"{stem}-{end}")
    assert (found, number) == (f"{stem}-{end}", 0) or (
        found == stem and 1 < number <= MOST_PROJECTS and str(number) == end
    )
