"""A large memory: time and the sidecar's peak of resident memory, on a disk and on a real S3 server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from benchmarks import homes
from benchmarks.measure import bytes_in, shell, sidecar
from benchmarks.table import Section, seconds, size


def measure(folder: Path, total: int) -> Section:
    home = folder / "home"
    homes.large(home, total, homes.Words(2, 32 << 20))
    section = Section(f"A memory of {size(bytes_in(home))}")
    for name, script in (("gzip -1", "gzip -1"), ("zstd -3 -T0", "zstd -q -3 -T0")):
        if shutil.which(script.split()[0]):
            _beside(section, folder, name, script)
    for store in (f"file:{folder}/store", "s3"):
        with _opened(store, section) as url:
            if url:
                _travel(section, folder, url, store.partition(":")[0])
    return section


def _beside(section: Section, folder: Path, name: str, script: str) -> None:
    """What plain tar takes for the same tree in the same run, out and in."""
    places = {"home": folder / "home", "packed": folder / "packed", "out": folder / "out"}
    packing = shell(f'tar -C "$home" -c .claude-mem | {script} > "$packed"', **places)
    places["out"].mkdir()
    tool = script.split()[0]
    unpacking = shell(f'{tool} -q -d -c < "$packed" | tar -C "$out" -x', **places)
    packed = size(places["packed"].stat().st_size)
    section.add(f"tar | {name}", "", f"{seconds(packing)}, {packed}; unpacking {seconds(unpacking)}")
    shutil.rmtree(places["out"])
    places["packed"].unlink()


def _travel(section: Section, folder: Path, url: str, kind: str) -> None:
    home, other, temporary = folder / "home", folder / "other", folder / "tmp"
    shutil.rmtree(home / ".cache", ignore_errors=True)
    temporary.mkdir(exist_ok=True)
    exported = sidecar("export", "large", f"--sandbox=local:{home}", store=url, temporary=temporary, expect="committed")
    added = size(exported.receipt["packed_bytes"])
    section.add(f"export to {kind}:", f"{seconds(exported.seconds)}, {added}, peak RSS {size(exported.peak)}")
    same = sidecar("export", "large", f"--sandbox=local:{home}", store=url, temporary=temporary, expect="unchanged")
    section.add(f"the same again, {kind}:", f"{seconds(same.seconds)}, peak RSS {size(same.peak)}")
    other.mkdir()
    restored = sidecar(
        "restore", "large", f"--sandbox=local:{other}", store=url, temporary=temporary, expect="complete"
    )
    section.add(f"restore from {kind}:", f"{seconds(restored.seconds)}, peak RSS {size(restored.peak)}")
    for root in (home, other):
        shutil.rmtree(root / ".cache", ignore_errors=True)
    shell('diff -rq "$home" "$other"', home=home, other=other)
    shutil.rmtree(other)


@contextmanager
def _opened(store: str, section: Section) -> Iterator[str]:
    """A store's URL; for ``s3`` that of a real server started for the occasion, or nothing where it cannot be."""
    if store != "s3":
        yield store
        return
    from tests.parts.s3_servers import CannotStart, seaweedfs

    try:
        with seaweedfs() as server:
            before = dict(os.environ)
            os.environ.update(server.environment())
            try:
                yield f"s3://{server.make_bucket(f'bench-{uuid4().hex[:8]}')}/p?endpoint={server.endpoint}"
            finally:
                os.environ.clear()
                os.environ.update(before)
    except CannotStart as reason:
        section.add("s3:", f"skipped: {reason}")
        yield ""
