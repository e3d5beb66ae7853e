"""The package with the program, which a sandbox keeps where its agent can write: only the right bytes are ever run."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import threading
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.sandbox import delivery
from sidecar.engine.sandbox.delivery import build_program
from sidecar.errors import BadAnswer
from sidecar.ports import CommandResult
from sidecar.receipts import ExportReceipt
from tests.parts.forgery import framed
from tests.parts.homes import OwnMachine, empty_home, engine_at, told, tree, without_cache, write
from tests.parts.memories import plain_home
from tests.parts.sent import ARGUMENTS

PROJECT = Path(delivery.ROOT).parent


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_at(tmp_path / "store")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return plain_home(empty_home(tmp_path / "home"))


async def exported(engine: Engine, home: Path) -> ExportReceipt:
    return await export(engine, OwnMachine(home), ExportRequest(memory="m"))


def cached(home: Path) -> Path:
    """Where a sandbox keeps the program."""
    return home / f".cache/memory-sidecar/.program-{build_program().sha256}.zip"


def kept(home: Path, kind: str = "program") -> list[str]:
    return sorted(path.name for path in (home / ".cache/memory-sidecar").glob(f".{kind}-*"))


def evil(mark: Path) -> bytes:
    """A package in perfect order, whose program does as it likes."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(build_program().data)) as good, zipfile.ZipFile(target, "w") as bad:
        for name in good.namelist():
            text = good.read(name)
            if name == "sidecar/program/loader.py":
                text = f"open({str(mark)!r}, 'w').close()\n".encode() + text.replace(b"from __future__", b"# ")
            bad.writestr(name, text)
    return target.getvalue()


# The package


def test_it_has_every_module_of_its_rooms_as_it_is() -> None:
    with zipfile.ZipFile(io.BytesIO(build_program().data)) as whole:
        found = {name: whole.read(name) for name in whole.namelist()}
    files = [path for room in ("format", "program") for path in (PROJECT / "sidecar" / room).rglob("*.py")]
    assert found == {path.relative_to(PROJECT).as_posix(): path.read_bytes() for path in files}


def test_the_same_modules_make_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = build_program()
    for room in delivery.ROOMS:
        shutil.copytree(PROJECT / "sidecar" / room, tmp_path / "sidecar" / room)
        for path in (tmp_path / "sidecar" / room).rglob("*.py"):
            os.utime(path, (1, 1))
            path.chmod(0o600)
    monkeypatch.setattr(delivery, "ROOT", tmp_path / "sidecar")
    assert build_program.__wrapped__().data == here.data


# What a sandbox keeps of it


async def test_it_is_sent_once_and_kept(engine: Engine, home: Path) -> None:
    first = await exported(engine, home)
    assert (first.outcome, first.trips) == ("committed", {"command": 2})
    assert hashlib.sha256(cached(home).read_bytes()).hexdigest() == build_program().sha256
    assert cached(home).stat().st_mode & 0o777 == 0o600
    again = await exported(engine, home)
    assert (again.outcome, again.trips) == ("unchanged", {"command": 1})
    assert again.transferred_bytes < 8_000


async def test_a_restore_brings_it(engine: Engine, home: Path, tmp_path: Path) -> None:
    await exported(engine, home)
    other = empty_home(tmp_path / "other")
    restored = await restore(engine, OwnMachine(other), RestoreRequest(memory="m"))
    assert (restored.outcome, restored.trips) == ("complete", {"upload": 1, "command": 1})
    assert without_cache(tree(other)) == without_cache(tree(home))
    after = await exported(engine, other)
    assert (after.outcome, after.trips) == ("unchanged", {"command": 1})
    assert after.transferred_bytes < 8_000


def truncated(place: Path, mark: Path) -> None:
    place.write_bytes(place.read_bytes()[:-100])


def emptied(place: Path, mark: Path) -> None:
    place.write_bytes(b"")


def altered(place: Path, mark: Path) -> None:
    data = bytearray(place.read_bytes())
    data[data.index(b"Run one request and print one answer")] ^= 1  # in a docstring, where it would not be noticed
    place.write_bytes(data)


def replaced(place: Path, mark: Path) -> None:
    place.write_bytes(evil(mark))


def linked(place: Path, mark: Path) -> None:
    """To the right bytes, at the moment."""
    elsewhere = place.parent / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere)


def piped(place: Path, mark: Path) -> None:
    place.unlink()
    os.mkfifo(place)


def foldered(place: Path, mark: Path) -> None:
    place.unlink()
    write(place / "inner", b"x")


def of_another_version(place: Path, mark: Path) -> None:
    place.unlink()
    place.with_name(f".program-{hashlib.sha256(evil(mark)).hexdigest()}.zip").write_bytes(evil(mark))


@pytest.mark.parametrize(
    "spoil",
    [truncated, emptied, altered, replaced, linked, piped, foldered, of_another_version],
    ids=lambda f: f.__name__,
)
async def test_another_program_in_its_place_is_never_run(
    spoil: Callable[[Path, Path], None], engine: Engine, home: Path, tmp_path: Path
) -> None:
    await exported(engine, home)
    spoil(cached(home), mark := tmp_path / "ran")
    write(home / "MEMORY.md", b"changed")
    receipt = await exported(engine, home)
    assert (receipt.outcome, receipt.kind, receipt.trips) == ("committed", "delta", {"command": 2})
    assert told(receipt) == [] and not mark.exists()
    assert cached(home).read_bytes() == build_program().data and not cached(home).is_symlink()
    assert (await exported(engine, home)).trips == {"command": 1}


@contextmanager
def swapping(place: Path, mark: Path) -> Iterator[None]:
    """Something that puts another program in the place of the right one, and back, without a pause: by renaming it, and
    by writing over it."""
    good, bad, ended = build_program().data, evil(mark), threading.Event()
    spare, half = place.with_name("spare"), len(good) // 2

    def swap() -> None:
        while not ended.is_set():
            for data in (bad, good):
                spare.write_bytes(data)
                spare.replace(place)
            with place.open("r+b") as file:
                for part in (bad[:half], good[:half], bad[half:], good):
                    file.seek(0)
                    file.write(part)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def test_a_program_that_is_replaced_while_it_is_read_is_not_run(
    engine: Engine, home: Path, tmp_path: Path
) -> None:
    await exported(engine, home)
    trips = set()
    with swapping(cached(home), mark := tmp_path / "ran"):
        for number in range(12):
            write(home / "MEMORY.md", b"%d" % number)
            receipt = await exported(engine, home)
            assert receipt.outcome == "committed"
            trips.add(receipt.trips["command"])
    assert not mark.exists()
    assert 2 in trips, "it was never read at the wrong moment: this test proves nothing"


async def test_two_versions_are_kept_and_no_more(engine: Engine, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sidecars of different versions work in one sandbox without sending their programs again and again."""
    await exported(engine, home)
    ours, names = build_program(), []
    for number in (1, 2):
        target = io.BytesIO(ours.data)
        with zipfile.ZipFile(target, "a") as changed:
            changed.writestr("version", str(number))
        other = delivery.KeptFile(target.getvalue())
        monkeypatch.setattr("sidecar.engine.sandbox.dialogue.build_program", lambda other=other: other)
        names.append(f".program-{other.sha256}.zip")
        assert (await exported(engine, home)).trips == {"command": 2}
        assert (await exported(engine, home)).trips == {"command": 1}
    assert kept(home) == sorted(names)


async def test_caches_of_earlier_versions_are_taken_over(engine: Engine, home: Path) -> None:
    """They have no program in them. What they know of the memory is used: the next export is a delta."""
    await exported(engine, home)
    for name in (*kept(home), *kept(home, "rules")):
        (home / ".cache/memory-sidecar" / name).unlink()
    write(home / "MEMORY.md", b"changed")
    receipt = await exported(engine, home)
    assert (receipt.outcome, receipt.kind, receipt.trips) == ("committed", "delta", {"command": 2})


# Rules


async def test_rules_are_kept_and_checked_like_the_program(engine: Engine, home: Path) -> None:
    await exported(engine, home)
    (name,) = kept(home, "rules")
    place = home / ".cache/memory-sidecar" / name
    right = place.read_bytes()
    for wrong in (right[:-1], right.replace(b'"never"', b'"other"'), b""):
        place.write_bytes(wrong)
        receipt = await exported(engine, home)
        assert (receipt.outcome, receipt.trips) == ("unchanged", {"command": 2})
        assert receipt.transferred_bytes < 16_000, "the program was not sent again"
        assert place.read_bytes() == right
    place.unlink()
    place.symlink_to("/dev/zero")
    assert (await exported(engine, home)).trips == {"command": 2}


# Sandboxes that keep nothing, or lose what they are sent


class Noting(OwnMachine):
    """A sandbox that remembers which files it was sent."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.uploads: list[Path] = []

    async def upload(self, path: str, chunks: AsyncIterator[bytes]) -> None:
        self.uploads.append(Path(path))
        await super().upload(path, chunks)


class Stubborn(Noting):
    """It says that it lacks something whatever it was sent."""

    def __init__(self, home: Path, status: str) -> None:
        super().__init__(home)
        self.status, self.calls = status, 0

    async def run(self, command: str, **how: Any) -> CommandResult:
        self.calls += 1
        nonce = ARGUMENTS.search(command)
        assert nonce is not None
        return CommandResult(0, framed(nonce["nonce"], {"status": self.status}))


@pytest.mark.parametrize("status", ["need-program", "need-rules"])
async def test_a_sandbox_that_always_lacks_something_is_given_up(status: str, engine: Engine, home: Path) -> None:
    sandbox = Stubborn(home, status)
    with pytest.raises(BadAnswer, match="lacks what was just sent"):
        await export(engine, sandbox, ExportRequest(memory="m"))
    assert sandbox.calls == 6, "three for the export, three to clean up"
    assert sandbox.uploads and not any(path.exists() for path in sandbox.uploads)


class Deaf(Noting):
    """A sandbox whose provider does not pass variables on."""

    async def run(self, command: str, **how: Any) -> CommandResult:
        how.pop("environment", None)
        return await super().run(command, **how)


async def test_what_is_lost_in_the_environment_is_sent_as_a_file(engine: Engine, home: Path) -> None:
    sandbox = Deaf(home)
    first = await export(engine, sandbox, ExportRequest(memory="m"))
    assert (first.outcome, first.trips) == ("committed", {"command": 3, "upload": 1})
    again = await export(engine, sandbox, ExportRequest(memory="m"))
    assert (again.outcome, again.trips) == ("unchanged", {"command": 1})
    assert [path.exists() for path in sandbox.uploads] == [False]


async def test_what_is_too_long_for_an_environment_is_sent_as_a_file(
    engine: Engine, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "MOST_VARIABLES", 10_000)
    sandbox = Noting(home)
    first = await export(engine, sandbox, ExportRequest(memory="m"))
    assert (first.outcome, first.trips) == ("committed", {"command": 2, "upload": 1})
    assert [path.exists() for path in sandbox.uploads] == [False]


class Confined(OwnMachine):
    """A sandbox with a temporary folder of its own."""

    def __init__(self, home: Path, temporary: Path) -> None:
        super().__init__(home)
        self._environment = {**self._environment, "TMPDIR": str(temporary)}


async def test_a_home_that_cannot_be_written_is_said_and_works(engine: Engine, home: Path, tmp_path: Path) -> None:
    write(home / ".cache", b"not a folder")
    spare = empty_home(tmp_path / "spare")
    for trips, outcome in ((2, "committed"), (1, "unchanged")):
        receipt = await export(engine, Confined(home, spare), ExportRequest(memory="m"))
        assert (receipt.outcome, receipt.trips) == (outcome, {"command": trips})
        assert [line for line in told(receipt) if "and the sidecar's program with it" in line], receipt.warnings
    shutil.rmtree(spare)
    spare.mkdir()
    assert (await export(engine, Confined(home, spare), ExportRequest(memory="m"))).trips == {"command": 2}


async def test_a_cache_without_room_for_the_program_costs_a_request_and_says_so(
    engine: Engine, tmp_path: Path, mount: Callable[..., Path]
) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"remember")
    mount(empty_home(home / ".cache"), size="200k")
    for outcome in ("committed", "unchanged"):
        receipt = await exported(engine, home)
        assert (receipt.outcome, receipt.trips) == (outcome, {"command": 2})
        (warning,) = told(receipt)
        assert "program could not be kept" in warning and "costs another request" in warning
    assert kept(home) == [] and len(kept(home, "rules")) == 1
