"""Backups from before there was a sidecar become memories when a service starts: each once, and none is touched."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sidecar.engine.archives.tarballs import adopt
from sidecar.engine.queries import list_snapshots
from sidecar.format.checksums import encode_checksummed
from sidecar.ids import MemoryKeys, make_snapshot_id
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.jobs import adoption
from sidecar.service.jobs.adoption import CLAIM, AdoptionJob, Claim
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.settings import Service
from tests.parts.homes import empty_home, engine_at, run_cli, tree
from tests.parts.services import path, serving, until

pytestmark = pytest.mark.usefixtures("forked_programs")


def tarball(text: str = "learned") -> bytes:
    """A home as a script would have packed it."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in ("home/agent/MEMORY.md", "home/agent/memory/notes.md"):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return made.getvalue()


def put(file: Path, data: bytes, age: float = 3600) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(data)
    os.utime(file, (time.time() - age,) * 2)
    return file


class Adopter:
    """A service without HTTP, as far as adoption goes."""

    def __init__(self, tmp_path: Path) -> None:
        self.sidecar = Sidecar(engine_at(tmp_path / "store"), Service())
        self.events: list[tuple[str, str]] = []
        self.sidecar.events.subscribe(lambda event: self.events.append((event.type, event.memory)))
        self.keeper = Keeper(self.sidecar, Jobs())
        self.again: list[float] = []
        self.job = AdoptionJob(self.keeper, self.sidecar, self, str(tmp_path / "backups"))  # type: ignore[arg-type]

    def run_once(self, name: str, seconds: float, work: Any) -> None:
        self.again.append(seconds)

    async def look(self) -> list[tuple[str, str]]:
        """Do a round; return what happened."""
        await self.keeper.lease.renew()
        self.events.clear()
        self.again.clear()
        await self.job.run_round()
        return list(self.events)

    async def snapshots(self, memory: str) -> list[str]:
        return [row.snapshot for row in (await list_snapshots(self.sidecar.engine.repository, memory)).snapshots]


async def test_each_backup_becomes_a_memory_and_stays_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "backups"
    put(folder / "conductor.tar.gz", gzip.compress(tarball()))
    put(folder / "Agent 7.tgz", gzip.compress(tarball("seven")))
    put(folder / "plain.tar", tarball("plain"))
    put(folder / "z.tar.zst", zstandard.compress(tarball("z")))
    put(folder / "z.tar", tarball("older"), age=7200)
    put(folder / "README.txt", b"no backup")
    put(folder / ".half.tar.gz", b"hidden")
    put(folder / "..tar.gz", gzip.compress(tarball()))
    put(folder / "two\u200bwords.tar.gz", gzip.compress(tarball()))
    (folder / "link.tar.gz").symlink_to(folder / "plain.tar")
    before = tree(folder)
    adopter = Adopter(tmp_path)
    happened = await adopter.look()
    assert sorted(happened) == [("export.committed", name) for name in ("Agent 7", "conductor", "plain", "z")]
    assert tree(folder) == before and not adopter.again
    said = capsys.readouterr()
    assert "two" in said.out + said.err and "link.tar.gz" in said.out + said.err
    assert await adopter.look() == []
    assert await Adopter(tmp_path).look() == []
    home = empty_home(tmp_path / "home")
    restored = run_cli("restore", "z", f"--sandbox=local:{home}", store=tmp_path / "store")
    assert restored.document["outcome"] == "complete" and (home / "MEMORY.md").read_text() == "z"


async def test_a_memory_that_exists_is_left_alone(tmp_path: Path) -> None:
    file = put(tmp_path / "backups/conductor.tar.gz", gzip.compress(tarball()))
    adopter = Adopter(tmp_path)
    await adopter.look()
    (first,) = await adopter.snapshots("conductor")
    put(file, gzip.compress(tarball("the script runs on")))
    assert await adopter.look() == [] and await Adopter(tmp_path).look() == []
    assert await adopter.snapshots("conductor") == [first]


async def test_what_is_being_written_is_left_for_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gzip.compress(tarball())
    file, adopter = tmp_path / "backups/conductor.tar.gz", Adopter(tmp_path)
    put(file, whole, age=1)  # young
    assert await adopter.look() == [] and adopter.again
    put(file, whole[:-20])  # truncated
    assert await adopter.look() == [("export.failed", "conductor")] and adopter.again
    assert await adopter.look() == [] and adopter.again, "it is not tried again as it is"
    put(file, whole, age=-600)  # by a clock that is ahead: it is not known to be young
    unpack = adopt

    async def grow(*args: Any) -> Any:
        file.write_bytes(whole + b"\0")
        return await unpack(*args)

    monkeypatch.setattr(adoption, "adopt", grow)
    assert await adopter.look() == [("export.failed", "conductor")] and adopter.again
    assert not await adopter.job._is_known("conductor"), "nothing was stored of what changed while it was read"
    monkeypatch.setattr(adoption, "adopt", unpack)
    put(file, whole)
    assert await adopter.look() == [("export.committed", "conductor")] and not adopter.again


async def test_of_several_services_one_adopts(tmp_path: Path) -> None:
    for number in range(4):
        put(tmp_path / f"backups/m{number}.tar.gz", gzip.compress(tarball(str(number))))
    services = [Adopter(tmp_path) for _ in range(3)]
    happened = [event for events in await asyncio.gather(*(one.look() for one in services)) for event in events]
    assert sorted(happened) == [("export.committed", f"m{number}") for number in range(4)]
    for number in range(4):
        assert len(await services[0].snapshots(f"m{number}")) == 1


@pytest.mark.parametrize("alive", [True, False])
async def test_the_claim_of_a_service_counts_as_long_as_it_lives(tmp_path: Path, alive: bool) -> None:
    put(tmp_path / "backups/conductor.tar.gz", gzip.compress(tarball()))
    other, adopter = Adopter(tmp_path), Adopter(tmp_path)
    if alive:
        await other.keeper.lease.renew()
    claim = Claim(other.keeper.lease.instance, make_snapshot_id(datetime.now(UTC)))
    store = adopter.sidecar.engine.repository.store
    await store.prepare()
    await store.swap(MemoryKeys.of("conductor").call(CLAIM), encode_checksummed(asdict(claim)), expected=None)
    assert await adopter.look() == ([] if alive else [("export.committed", "conductor")])
    assert bool(adopter.again) is alive
    if not alive:
        assert await adopter.snapshots("conductor") == [claim.snapshot]


async def test_what_a_service_stored_before_it_died_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "backups/conductor.tar.gz", gzip.compress(tarball()))
    dying, other = Adopter(tmp_path), Adopter(tmp_path)

    async def die(*args: Any, **more: Any) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patched:
        patched.setattr("sidecar.engine.exports.commit.advance_head", die)
        assert ("export.failed", "conductor") in await dying.look()
    await dying.keeper.lease.release()
    (stored,) = await other.snapshots("conductor")
    assert await other.look() == [("export.committed", "conductor")]
    assert await other.snapshots("conductor") == [stored]
    assert (await other.sidecar.engine.repository.head("conductor")).snapshot == stored


@contextmanager
def served(tmp_path: Path) -> Iterator[Any]:
    more = f'[adopt]\nfolder = "{tmp_path}/backups"\n'
    with serving(tmp_path / "store", tmp_path / "log", more=more, lease=1) as service:
        yield service


def test_a_service_that_is_killed_while_it_adopts_has_adopted_after_its_next_start(tmp_path: Path) -> None:
    for number in range(6):
        put(tmp_path / f"backups/m{number}.tar.gz", gzip.compress(tarball(str(number))))
    put(tmp_path / "backups/broken.tar.gz", b"no tarball")
    with served(tmp_path) as service:
        assert service.http.get("/readyz").status_code == 200, "it serves while it adopts"
        until(lambda: service.http.get("/v1/memories").json()["memories"])
        service.kill()
        service.start()
        until(lambda: len(service.http.get("/v1/memories").json()["memories"]) == 6)
        for number in range(6):
            rows = service.http.get(path(f"m{number}", "snapshots")).json()["snapshots"]
            assert [row["label"] for row in rows] == ["adopted"]


def test_a_folder_that_is_none_is_refused_and_one_with_strange_names_is_told(tmp_path: Path) -> None:
    put(tmp_path / "backups/..tar.gz", tarball())
    put(tmp_path / "backups/a\u200bb.tar", tarball())
    config = tmp_path / "c.toml"
    config.write_text(f'[adopt]\nfolder = "{tmp_path}/backups"\n')
    checked = run_cli("config", "check", f"--config={config}", store=tmp_path / "store")
    assert checked.code == 0 and any("is not adopted" in warning for warning in checked.document["warnings"])
    config.write_text('[adopt]\nfolder = "backups"\n')
    assert (
        "c.toml:2: [adopt] folder"
        in run_cli("config", "check", f"--config={config}", store="").document["error"]["message"]
    )
