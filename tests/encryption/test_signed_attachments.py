"""What a service keeps in a signed store for itself: altered, it is not obeyed; put back, it is replaced."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from sidecar.errors import NotSigned, ObjectRefused
from sidecar.ids import build_attachment_key, build_conversation_key
from sidecar.service.attachments.attachment import Attachment, CareOptions
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.settings import Service
from sidecar.store.encryption.given_keys import GivenKeys
from sidecar.store.encryption.names import is_opaque
from tests.parts.keys import ENCRYPTED, SIGNED, engine_with

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "conductor"
LASTING = CareOptions(lasting=True)


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    return Keeper(Sidecar(engine_with(tmp_path / "store", SIGNED), Service()), Jobs())


def told(log: list[Any], event: str) -> bool:
    return any(event in line["event"] for line in log)


async def attach(keeper: Keeper, sandbox: str, care: CareOptions = LASTING, memory: str = MEMORY) -> Attachment:
    return await keeper.look_after((memory, f"local:/{sandbox}"), care)


async def test_an_earlier_attachment_put_back_is_replaced(keeper: Keeper, tmp_path: Path) -> None:
    at = tmp_path / "store" / build_attachment_key(MEMORY)
    await attach(keeper, "ours")
    shutil.copyfile(at, tmp_path / "earlier")
    await attach(keeper, "ours", CareOptions(lasting=True, conversation="later"))
    shutil.copyfile(tmp_path / "earlier", at)
    with structlog.testing.capture_logs() as log:
        await keeper.renew_and_look_around()
    assert told(log, "put back")
    assert (await keeper.find(MEMORY)).conversation == "later"
    assert [one.conversation for one in keeper.attachments] == ["later"]


async def test_one_that_is_detached_and_attached_anew_is_not_put_back(keeper: Keeper, tmp_path: Path) -> None:
    for _ in range(2):
        await attach(keeper, "ours")
    other = Keeper(Sidecar(engine_with(tmp_path / "store", SIGNED), Service()), Jobs())
    await other.detach(await other.find(MEMORY))
    await attach(other, "ours", CareOptions(lasting=True, conversation="theirs"))
    await keeper.renew_and_look_around()
    assert (await keeper.find(MEMORY)).conversation == "theirs"
    assert keeper.attachments == []


@pytest.mark.parametrize("care", [LASTING, CareOptions()])
async def test_an_altered_attachment_is_not_obeyed_not_dropped_and_can_be_made_anew(
    keeper: Keeper, tmp_path: Path, care: CareOptions
) -> None:
    await attach(keeper, "ours", care)
    (at,) = [*(tmp_path / "store/attachments").glob("[!.]*"), *(tmp_path / "store/conversations").glob("[!.]*")]
    at.write_bytes(at.read_bytes().replace(b"local:/ours", b"local:/evil"))
    with structlog.testing.capture_logs() as log:
        await keeper.renew_and_look_around()
        await keeper.renew_and_look_around()
    assert [line["event"] for line in log] == ["an attachment is refused"], "told once"
    assert [one.sandbox for one in keeper.attachments] == ["local:/ours"]
    with pytest.raises(NotSigned, match=rf"{at.parent.name}/{at.stem}"):
        await keeper.find(MEMORY, "local:/ours")
    await attach(keeper, "ours", replace(care, conversation="again"))
    assert (await keeper.find(MEMORY, "local:/ours")).conversation == "again"


@pytest.mark.parametrize("given", [GivenKeys(), ENCRYPTED])
@pytest.mark.parametrize("how", ["another's", "cut short"])
async def test_without_signatures_too_a_wrong_attachment_is_told_and_can_be_made_anew(
    tmp_path: Path, given: GivenKeys, how: str
) -> None:
    keeper = Keeper(Sidecar(engine_with(tmp_path / "store", given), Service()), Jobs())
    await attach(keeper, "ours")
    (ours,) = (tmp_path / "store/attachments").glob("[!.]*")
    await attach(keeper, "theirs", memory="theirs")
    (theirs,) = set((tmp_path / "store/attachments").glob("[!.]*")) - {ours}
    ours.write_bytes(theirs.read_bytes() if how == "another's" else ours.read_bytes()[:-3])
    with structlog.testing.capture_logs() as log:
        await keeper.renew_and_look_around()
    assert told(log, "refused")
    assert sorted(one.sandbox for one in keeper.attachments) == ["local:/ours", "local:/theirs"]
    with pytest.raises(ObjectRefused, match=r"attachments/conductor\.json is damaged"):
        await keeper.find(MEMORY)
    await attach(keeper, "again")
    assert (await keeper.find(MEMORY)).sandbox == "local:/again"


async def test_names_of_sandboxes_are_hidden_where_names_are(tmp_path: Path) -> None:
    keeper = Keeper(Sidecar(engine_with(tmp_path / "store", ENCRYPTED), Service()), Jobs())
    first, second = await attach(keeper, "ours"), await attach(keeper, "theirs", CareOptions(conversation="c"))
    names = [path.name for path in (tmp_path / "store").glob("*/*") if path.is_file()]
    assert len({name for name in names if is_opaque(name)}) >= 2
    assert not [
        name for name in names if "conductor" in name or name.startswith(build_conversation_key(*second.place)[14:30])
    ]
    again = Keeper(Sidecar(engine_with(tmp_path / "store", ENCRYPTED), Service()), Jobs())
    assert sorted(one.place for one in await again.find_all()) == sorted([first.place, second.place])
