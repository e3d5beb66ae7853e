"""What a service keeps in a signed store for itself: altered, it is not obeyed; put back, it is replaced."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from sidecar.errors import NotSigned, ObjectRefused
from sidecar.ids import attachment_key
from sidecar.sealing.given import Given
from sidecar.service.attachments import Attachment
from sidecar.service.jobs import Jobs
from sidecar.service.keeper import Keeper
from sidecar.service.settings import Service
from sidecar.service.sidecar import Sidecar
from tests.parts.keys import ENCRYPTED, SIGNED, engine_with

MEMORY = "conductor"


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    return Keeper(Sidecar(engine_with(tmp_path / "store", SIGNED), Service()), Jobs())


def told(log: list[Any], event: str) -> bool:
    return any(event in line["event"] for line in log)


async def test_an_earlier_attachment_put_back_is_replaced(keeper: Keeper, tmp_path: Path) -> None:
    at = tmp_path / "store" / attachment_key(MEMORY)
    await keeper.attach(Attachment(memory=MEMORY, sandbox="local:/first"))
    shutil.copyfile(at, tmp_path / "earlier")
    await keeper.attach(Attachment(memory=MEMORY, sandbox="local:/second"))
    shutil.copyfile(tmp_path / "earlier", at)
    with structlog.testing.capture_logs() as log:
        await keeper.tick()
    assert told(log, "put back")
    assert (await keeper.find(MEMORY)).sandbox == "local:/second"
    assert [one.sandbox for one in keeper.attachments] == ["local:/second"]


async def test_one_that_is_detached_and_attached_anew_is_not_put_back(keeper: Keeper, tmp_path: Path) -> None:
    for name in ("first", "second"):
        await keeper.attach(Attachment(memory=MEMORY, sandbox=f"local:/{name}"))
    other = Keeper(Sidecar(engine_with(tmp_path / "store", SIGNED), Service()), Jobs())
    await other.detach(await other.find(MEMORY))
    await other.attach(Attachment(memory=MEMORY, sandbox="local:/third"))
    await keeper.tick()
    assert (await keeper.find(MEMORY)).sandbox == "local:/third"
    assert keeper.attachments == []


async def test_an_altered_attachment_is_not_obeyed_not_dropped_and_can_be_made_anew(
    keeper: Keeper, tmp_path: Path
) -> None:
    at = tmp_path / "store" / attachment_key(MEMORY)
    await keeper.attach(Attachment(memory=MEMORY, sandbox="local:/ours"))
    at.write_bytes(at.read_bytes().replace(b"local:/ours", b"local:/evil"))
    with structlog.testing.capture_logs() as log:
        await keeper.tick()
    assert told(log, "refused")
    assert [one.sandbox for one in keeper.attachments] == ["local:/ours"]
    with pytest.raises(NotSigned, match="attachments/conductor"):
        await keeper.find(MEMORY)
    await keeper.attach(Attachment(memory=MEMORY, sandbox="local:/again"))
    assert (await keeper.find(MEMORY)).sandbox == "local:/again"


@pytest.mark.parametrize("given", [Given(), ENCRYPTED])
@pytest.mark.parametrize("how", ["another's", "cut short"])
async def test_without_signatures_too_a_wrong_attachment_is_told_and_can_be_made_anew(
    tmp_path: Path, given: Given, how: str
) -> None:
    keeper = Keeper(Sidecar(engine_with(tmp_path / "store", given), Service()), Jobs())
    await keeper.attach(Attachment(memory=MEMORY, sandbox="local:/ours"))
    (ours,) = (tmp_path / "store/attachments").glob("[!.]*")
    await keeper.attach(Attachment(memory="theirs", sandbox="local:/theirs"))
    (theirs,) = set((tmp_path / "store/attachments").glob("[!.]*")) - {ours}
    ours.write_bytes(theirs.read_bytes() if how == "another's" else ours.read_bytes()[:-3])
    with structlog.testing.capture_logs() as log:
        await keeper.tick()
    assert told(log, "refused")
    assert sorted(one.sandbox for one in keeper.attachments) == ["local:/ours", "local:/theirs"]
    with pytest.raises(ObjectRefused, match=r"attachments/conductor\.json is damaged"):
        await keeper.find(MEMORY)
    await keeper.attach(Attachment(memory=MEMORY, sandbox="local:/again"))
    assert (await keeper.find(MEMORY)).sandbox == "local:/again"
