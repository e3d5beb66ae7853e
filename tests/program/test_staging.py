"""What a restore stages is compared with the snapshot: by the bytes as they are written, or, where a patch leaves a doubt,
by reading the file again."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest

from sidecar.format import digests
from sidecar.format.index import DIR, FILE, Change, Entry, Index
from sidecar.format.packs import Packer
from sidecar.format.refusal import Refusal
from sidecar.program.restore.staging import Unpacker

BLOCK = 4096
PATH = "claude-mem/a.db"
FOLDER = Change(Entry("claude-mem", DIR, 0o700))


def _describe(data: bytes) -> Entry:
    digest, sums = digests.digest_bytes(data, BLOCK)
    return Entry(PATH, FILE, 0o600, len(data), 0, digest, BLOCK, sums)


def _pack(change: Change, carried: bytes) -> bytes:
    target = io.BytesIO()
    packer = Packer(target)
    if change.blocks is None:
        packer.add(change.entry, io.BytesIO(carried), len(carried))
    else:
        packer.add_blocks(change.entry, io.BytesIO(carried), len(carried))
    packer.finish()
    return target.getvalue()


def _cut(data: bytes, blocks: list[int]) -> bytes:
    return b"".join(data[number * BLOCK : (number + 1) * BLOCK] for number in blocks)


def _unpack(folder: Path, versions: list[tuple[bytes, list[int] | None]], expected: Entry) -> Unpacker:
    unpacker = Unpacker({PATH: expected}, {"claude-mem": str(folder)})
    for data, blocks in versions:
        entry = _describe(data)
        change = Change(entry, blocks)
        carried = data if blocks is None else _cut(data, blocks)
        kind = "full" if blocks is None else "delta"
        unpacker.apply(io.BytesIO(_pack(change, carried)), "gz", Index(kind, [change], []))
    return unpacker


def _change(data: bytes, seed: int, size: int) -> tuple[bytes, list[int]]:
    """Return a later version of some data with that size, and the blocks that differ."""
    chance = random.Random(seed)
    new = bytearray(data[:size].ljust(size, b"x"))
    for _ in range(3):
        new[chance.randrange(size)] ^= 0xFF
    count = digests.count_blocks(size, BLOCK)
    same = [bytes(new[at * BLOCK : (at + 1) * BLOCK]) == data[at * BLOCK : (at + 1) * BLOCK] for at in range(count)]
    return bytes(new), [number for number in range(count) if not same[number]]


SIZES = [20 * BLOCK, 25 * BLOCK, 12 * BLOCK, 20 * BLOCK + 100, 25 * BLOCK + 7, 12 * BLOCK - 1]


@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("after", SIZES)
def test_a_patched_file_is_known_without_reading_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    old = random.Random(before).randbytes(before)
    new, blocks = _change(old, after, after)
    unpacker = _unpack(tmp_path, [(old, None), (new, blocks)], _describe(new))
    monkeypatch.setattr(digests, "digest_stream", lambda *words: pytest.fail("it was read again"))
    staged = unpacker.checked()[PATH]
    assert Path(staged.place).read_bytes() == new
    assert staged.sums == _describe(new).sums


def test_a_block_that_differs_is_found_where_it_is_written(tmp_path: Path) -> None:
    old = random.Random(1).randbytes(20 * BLOCK)
    new, blocks = _change(old, 2, len(old))
    for versions in ([(old, None)], [(old, None), (new, blocks[:-1])]):
        with pytest.raises(Refusal, match="1 of 1 files are missing or differ"):
            _unpack(tmp_path, versions, _describe(new)).checked()  # type: ignore[arg-type]


@pytest.mark.parametrize("grown", [1, 3 * BLOCK, 3 * BLOCK + 5])
def test_a_pack_without_the_block_in_which_a_file_ended_does_not_pass(tmp_path: Path, grown: int) -> None:
    """Its index says that the sum of that block is still the old one, and so does the snapshot's digest. The bytes say
    another thing: the file is longer now."""
    old = random.Random(3).randbytes(20 * BLOCK + 100)
    new = old + bytes(grown)
    honest, count = _describe(old), digests.count_blocks(len(new), BLOCK)
    carried = list(range(21, count))
    sums = honest.sums + b"".join(digests.hash_block(_cut(new, [number])) for number in carried)
    lie = honest._replace(size=len(new), sums=sums, digest=digests.digest_sums(sums))
    unpacker = _unpack(tmp_path, [(old, None)], lie)
    if carried:
        change = Change(lie._replace(sums=sums[-len(carried) * digests.SUM_BYTES :]), carried)
        unpacker.apply(io.BytesIO(_pack(change, _cut(new, carried))), "gz", Index("delta", [change], []))
    with pytest.raises(Refusal, match="missing or differ"):
        unpacker.checked()


def test_a_new_block_that_never_came_does_not_pass(tmp_path: Path) -> None:
    old = random.Random(4).randbytes(20 * BLOCK)
    honest = _describe(old)
    carried, hole = [21], bytes(digests.SUM_BYTES)
    new = old + bytes(BLOCK) + b"z" * BLOCK
    sums = honest.sums + hole + digests.hash_block(_cut(new, carried))
    lie = honest._replace(size=len(new), sums=sums, digest=digests.digest_sums(sums))
    unpacker = _unpack(tmp_path, [(old, None)], lie)
    change = Change(lie._replace(sums=sums[-digests.SUM_BYTES :]), carried)
    unpacker.apply(io.BytesIO(_pack(change, _cut(new, carried))), "gz", Index("delta", [change], []))
    with pytest.raises(Refusal, match="missing or differ"):
        unpacker.checked()


def test_no_staging_folder_is_made_through_a_link(tmp_path: Path) -> None:
    """The folder that a root is in may become a link at any moment of a restore."""
    folder = tmp_path.resolve()
    (folder / "outside").mkdir()
    (folder / ".claude-mem").symlink_to(folder / "outside")
    with pytest.raises(Refusal, match="lies behind a link"):
        Unpacker({}, {"claude-mem": f"{folder}/.claude-mem/.memory-sidecar-{'0' * 12}/new"})
    assert list((folder / "outside").iterdir()) == []
