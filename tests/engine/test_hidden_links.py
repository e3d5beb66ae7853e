"""Links to the bucket are for the program in the sandbox alone: no process there shows one to other users."""

from __future__ import annotations

import base64
import os
import re
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.sandbox import delivery, links
from sidecar.engine.sandbox.delivery import build_program
from sidecar.format.protocol import Link, OutgoingPart, Request, SendQuestion
from sidecar.ports import CommandResult
from tests.parts.homes import told, tree, without_cache
from tests.parts.memories import Box, Name, Provider, Watched, engine_on, grow_large, plain_home
from tests.parts.s3_servers import S3Server
from tests.parts.wire import wire_to

MEMORY = "conductor"
SIGNATURE = b"X-Amz-Signature"
PACKED = re.compile(rb"[A-Za-z0-9+/]{100,}={0,2}")

Open = Callable[[Name], Provider]


def _plainly(data: bytes) -> bytes:
    """What a command line says, also where it is packed."""
    found = [data]
    for text in PACKED.findall(data):
        try:
            found.append(zlib.decompress(base64.b64decode(text)))
        except (ValueError, zlib.error):
            continue
    return b"\n".join(found)


class Looking:
    """Looks at what processes show of themselves, again and again: to everybody, and to their own user."""

    def __init__(self) -> None:
        self.shown: set[bytes] = set()
        """Command lines with a request of ours in them."""
        self.kept: set[str] = set()
        """Names of processes that have links in their environment."""
        self._ended = threading.Event()

    def look(self) -> None:
        while not self._ended.is_set():
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    line, environment = ((entry / name).read_bytes() for name in ("cmdline", "environ"))
                except OSError:
                    continue
                if b"sidecar.program.main" in line:
                    self.shown.add(line)
                if delivery.LINKS.encode() in environment:
                    self.kept.add(os.fsdecode(line.split(b"\0")[0]).rpartition("/")[2])
            time.sleep(0.02)

    def requests(self, verb: str) -> list[bytes]:
        """The requests for this that were seen."""
        told = f'"do":"{verb}"'.encode()
        return [plain for line in self.shown if told in (plain := _plainly(line))]

    def end(self) -> None:
        self._ended.set()


@contextmanager
def looking() -> Iterator[Looking]:
    looker = Looking()
    thread = threading.Thread(target=looker.look)
    thread.start()
    try:
        yield looker
    finally:
        looker.end()
        thread.join()


@pytest.fixture
def slow(weed: S3Server, credentials_of: Callable[[S3Server], None]) -> Iterator[Engine]:
    """A bucket that sandboxes wait for."""
    credentials_of(weed)
    bucket = weed.make_bucket(f"hidden-{uuid.uuid4().hex}")

    def wait(sent: bytes) -> bool:
        if sent.startswith((b"GET ", b"PUT ")):
            time.sleep(0.4)
        return False

    with wire_to(weed.endpoint) as wire:
        wire.cut_request = wait
        url = f"s3://{bucket}/{uuid.uuid4().hex}?endpoint={weed.endpoint}&sandbox-endpoint={wire.endpoint}"
        yield engine_on(url, direct=True)


def _large(box: Box) -> Box:
    plain_home(box.home)
    grow_large(box.home)
    return box


@pytest.mark.parametrize("name", ["local", "e2b", pytest.param("daytona", marks=pytest.mark.slow)])
async def test_no_link_is_in_a_command_line(slow: Engine, open_provider: Open, name: Name) -> None:
    provider = open_provider(name)
    box, other = _large(provider.box()), provider.box()
    with looking() as looker:
        exported = await export(slow, box.open(), ExportRequest(memory=MEMORY))
        restored = await restore(slow, other.open(), RestoreRequest(memory=MEMORY))
    # Straight from and to the bucket, as it should be.
    assert (exported.outcome, told(exported)) == ("committed", [])
    assert "download" not in exported.trips
    assert (restored.outcome, restored.warnings) == ("complete", [])
    assert "upload" not in restored.trips
    assert without_cache(tree(other.home)) == without_cache(tree(box.home))
    for verb in ("send", "restore"):
        seen = looker.requests(verb)
        assert seen, "nobody saw the command: this test proves nothing"
        assert not [plain for plain in seen if SIGNATURE in plain or b"X-Amz" in plain]
    assert looker.kept, "the links were in no environment either"


async def test_what_the_program_starts_has_no_links(slow: Engine, open_provider: Open, tmp_path: Path) -> None:
    """It packs with zstd, where there is one: a process of its own."""
    box = _large(open_provider("local").box())
    await export(slow, box.open(), ExportRequest(memory=MEMORY))
    with looking() as looker:
        receipt = await restore(slow, open_provider("e2b").box().open(), RestoreRequest(memory=MEMORY))
    assert receipt.outcome == "complete"
    assert {name for name in looker.kept if not name.startswith(("python", "sh", "bash", "dash", "id"))} == set(), (
        "but for a login shell's own"
    )


class Deaf(Watched):
    """A sandbox whose provider does not pass variables on: what is no secret comes in files."""

    async def run(self, command: str, **how: Any) -> CommandResult:
        how.pop("environment", None)
        return await super().run(command, **how)


async def test_links_that_do_not_arrive_are_no_loss(slow: Engine, open_provider: Open) -> None:
    local = open_provider("local")
    box, other = _large(local.box()), local.box()
    exported = await export(slow, Deaf(box.open()), ExportRequest(memory=MEMORY))
    assert exported.outcome == "committed" and exported.trips["download"] == 1
    assert "links did not arrive" in told(exported)[0] and "through the sidecar" in told(exported)[0]
    restored = await restore(slow, Deaf(other.open()), RestoreRequest(memory=MEMORY))
    assert restored.outcome == "complete" and "links did not arrive" in restored.warnings[0]
    assert without_cache(tree(other.home)) == without_cache(tree(box.home))


async def test_links_too_long_for_a_variable_are_not_used(
    slow: Engine, open_provider: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "LONGEST_VARIABLE", 300)
    local = open_provider("local")
    box, other = _large(local.box()), local.box()
    exported = await export(slow, box.open(), ExportRequest(memory=MEMORY))
    assert exported.outcome == "committed" and exported.trips["download"] == 1
    assert "too long" in told(exported)[0]
    restored = await restore(slow, other.open(), RestoreRequest(memory=MEMORY))
    assert restored.outcome == "complete" and restored.trips["upload"] == 1


def test_the_links_of_the_longest_chain_of_packs_fit_into_a_variable() -> None:
    noise = os.urandom(32).hex()
    parts = [Link(f"https://bucket.s3.amazonaws.com/{n}?{noise}" + "x" * 900, {}) for n in range(16)]
    assert len(delivery.encode_links(parts)) < delivery.LONGEST_VARIABLE // 10


def test_a_question_is_encoded_without_its_links() -> None:
    question = SendQuestion("m", "s", "/path", [OutgoingPart(0, 1, Link("https://secret", {}))])
    assert b"secret" not in Request(question).encode()
    call = delivery.build_command(delivery.Load(question=question, program=build_program()))
    assert set(call.environment) == {delivery.LINKS}
