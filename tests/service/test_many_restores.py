"""One call restores a memory into many sandboxes: fetched once, each with a receipt or a problem of its own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapters.stores.disk import DiskStore
from sidecar.client import Client
from sidecar.service.access import refusals
from sidecar.service.access.grants import Verb
from tests.parts.homes import empty_home, run_cli, tree, without_cache, write
from tests.parts.memories import plain_home
from tests.parts.providers import Provider
from tests.parts.services import TOKEN, path, serving, until
from tests.parts.tenants import House

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "acme/lead"


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(refusals, "LONGEST_DELAY", 0.0)
    house = House(tmp_path)
    await house.keeper.lease.renew()
    home = plain_home(empty_home(tmp_path / "lead"))
    answer = await house.call("POST", path(MEMORY, "exports"), body={"sandbox": f"local:{home}"})
    assert answer.json["outcome"] == "committed", answer.body
    yield house
    await house.sidecar.close()


def homes(tmp_path: Path, count: int) -> list[Path]:
    return [empty_home(tmp_path / f"worker-{number}") for number in range(count)]


async def head_of(house: House) -> str:
    return str((await house.call("GET", path(MEMORY))).json["head"])


class Counted:
    """What is asked of the store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: Counter[str] = Counter()
        stream, get = DiskStore.stream, DiskStore.get

        def counted_stream(store: DiskStore, key: str, *args: Any, **more: Any) -> Any:
            self.read[key] += 1
            return stream(store, key, *args, **more)

        async def counted_get(store: DiskStore, key: str, *args: Any, **more: Any) -> Any:
            self.read[key] += 1
            return await get(store, key, *args, **more)

        monkeypatch.setattr(DiskStore, "stream", counted_stream)
        monkeypatch.setattr(DiskStore, "get", counted_get)


async def test_fifty_readers_are_one_fetch_and_the_head_stays(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, head = homes(tmp_path, 50), await head_of(house)
    counted = Counted(monkeypatch)
    body = {"sandboxes": [f"local:{home}" for home in workers], "read_only": True}
    answer = await house.call("POST", path(MEMORY, "restores"), body=body)
    assert answer.status == 207 and answer.json["complete"] and answer.json["memory"] == MEMORY
    assert [row["sandbox"] for row in answer.json["sandboxes"]] == body["sandboxes"]
    receipts = [row["receipt"] for row in answer.json["sandboxes"]]
    assert {(row["outcome"], row["snapshot"], row["read_only"]) for row in receipts} == {("complete", head, True)}
    assert [row["sandbox"] for row in receipts] == body["sandboxes"]
    first = without_cache(tree(tmp_path / "lead"))
    assert all(without_cache(tree(home)) == first for home in workers)
    packs = {key: count for key, count in counted.read.items() if "/packs/" in key}
    assert packs and set(packs.values()) == {1} and counted.read.total() < 20, counted.read
    write(workers[7] / "memory/learned.md", b"what a worker learned")
    told = await house.call("POST", path(MEMORY, "exports"), body={"sandbox": f"local:{workers[7]}"})
    assert told.json["outcome"] == "diverged" and await head_of(house) == head


async def test_a_part_for_many_is_cut_once(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = homes(tmp_path, 5)
    counted = Counted(monkeypatch)
    body = {"sandboxes": [f"local:{home}" for home in workers], "only": ["project/MEMORY.md"], "label": "crew"}
    answer = await house.call("POST", path(MEMORY, "restores"), body=body)
    assert answer.status == 207 and answer.json["complete"]
    assert {tuple(row["receipt"]["only"]) for row in answer.json["sandboxes"]} == {("project/MEMORY.md",)}
    assert [file.name for home in workers for file in home.rglob("*.md")] == ["MEMORY.md"] * 5
    assert {count for key, count in counted.read.items() if "/packs/" in key} == {1}
    assert (await house.call("GET", "/v1/attachments")).json["attachments"] == [], "readers are not looked after"
    write(workers[0] / "MEMORY.md", b"what a worker learned")
    told = await house.call("POST", path(MEMORY, "exports"), body={"sandbox": f"local:{workers[0]}"})
    assert (told.json["outcome"], told.json["label"]) == ("diverged", "crew")
    wrong = await house.call("POST", path(MEMORY, "restores"), body={**body, "only": ["layout:nothing"]})
    assert {row["problem"]["code"] for row in wrong.json["sandboxes"]} == {"unknown-layout"}


async def test_what_fails_in_one_sandbox_is_its_own_problem(
    house: House, tmp_path: Path, provider_of: Callable[[str], Provider]
) -> None:
    good, forbidden = homes(tmp_path, 2)
    provider = provider_of("e2b")
    live, dead = provider.create(), provider.create()
    dead.emulated.kill()
    outside = f"local:{tmp_path / 'nowhere'}"
    refs = [f"local:{good}", dead.ref, "e2b:", live.ref, outside, "nobody:1"]
    answer = await house.call("POST", path(MEMORY, "restores"), body={"sandboxes": refs, "read_only": True})
    assert answer.status == 207 and not answer.json["complete"]
    rows = {row["sandbox"]: row for row in answer.json["sandboxes"]}
    assert list(rows) == refs
    for ref in (refs[0], live.ref):
        assert rows[ref]["receipt"]["outcome"] == "complete" and rows[ref]["problem"] is None
    assert without_cache(tree(live.home)) == without_cache(tree(good))
    for ref in (dead.ref, "e2b:", outside, "nobody:1"):
        assert rows[ref]["receipt"] is None and rows[ref]["problem"]["code"] and rows[ref]["problem"]["hint"], rows[ref]
    assert rows[dead.ref]["problem"]["status"] in (404, 410)
    # Two names of one sandbox: it is restored into once, and left as it is.
    twice = [f"local:{good}", f"local:{good}/."]
    answer = await house.call("POST", path(MEMORY, "restores"), body={"sandboxes": twice, "read_only": True})
    assert [row["receipt"]["kept"] for row in answer.json["sandboxes"]] == [True, True]
    wrong: list[dict[str, Any]] = [
        {"sandboxes": [refs[0], refs[0]]},
        {"sandboxes": []},
        {"sandbox": refs[0], "sandboxes": [refs[0]]},
        {},
        {"sandboxes": ["local:x"] * 501},
    ]
    for each in wrong:
        assert (await house.call("POST", path(MEMORY, "restores"), body=each)).status in (400, 422), each
    assert without_cache(tree(forbidden)) == {}


async def test_a_tenant_reaches_only_its_own_sandboxes_and_memories(house: House, tmp_path: Path) -> None:
    good, other = homes(tmp_path, 2)
    token = house.grant("acme", ["acme/*"], [Verb.RESTORE], sandboxes=(f"local:{good}",))
    body = {"sandboxes": [f"local:{good}", f"local:{other}"], "read_only": True}
    answer = await house.call("POST", path(MEMORY, "restores"), body=body, token=token)
    mine, theirs = answer.json["sandboxes"]
    assert mine["receipt"]["outcome"] == "complete"
    assert theirs["receipt"] is None and theirs["problem"]["status"] == 403
    assert without_cache(tree(other)) == {}
    foreign = await house.call("POST", path("globex/vault", "restores"), body=body, token=token)
    assert foreign.status == 403
    forced = await house.call("POST", path(MEMORY, "restores"), body={**body, "discard": True}, token=token)
    assert forced.status == 403
    reader = house.grant("reader", ["acme/*"], [Verb.READ])
    assert (await house.call("POST", path(MEMORY, "restores"), body=body, token=reader)).status == 403


async def test_writers_are_looked_after_and_readers_are_not(house: House, tmp_path: Path) -> None:
    writers, readers = homes(tmp_path, 4)[:2], homes(tmp_path / "more", 2)
    for some, read_only in ((writers, False), (readers, True)):
        body = {"sandboxes": [f"local:{home}" for home in some], "read_only": read_only}
        assert (await house.call("POST", path(MEMORY, "restores"), body=body)).json["complete"]
    rows = (await house.call("GET", "/v1/attachments")).json["attachments"]
    assert {row["sandbox"] for row in rows if row["state"] == "open"} == {f"local:{home}" for home in writers}


async def test_one_key_is_for_one_list_of_sandboxes(house: House, tmp_path: Path) -> None:
    workers = homes(tmp_path, 3)
    refs, headers = [f"local:{home}" for home in workers], {"idempotency-key": "job-1"}

    async def ask(**body: Any) -> Any:
        return await house.call("POST", path(MEMORY, "restores"), body={"read_only": True, **body}, headers=headers)

    answer = await ask(sandboxes=refs[:2])
    again = await ask(sandboxes=refs[:2])
    assert again.json == answer.json, "answered as before, with the same receipts"
    for body in ({"sandboxes": refs}, {"sandboxes": refs[:2], "snapshot": "latest~0"}, {"sandbox": refs[0]}):
        assert (await ask(**body)).code == "idempotency-key-reused"
    assert without_cache(tree(workers[2])) == {}


async def test_a_memory_without_snapshots_is_a_first_start_everywhere(house: House, tmp_path: Path) -> None:
    body: dict[str, Any] = {"sandboxes": [f"local:{home}" for home in homes(tmp_path, 2)]}
    answer = await house.call("POST", path("acme/new", "restores"), body=body)
    assert answer.json["complete"] and {row["receipt"]["outcome"] for row in answer.json["sandboxes"]} == {"empty"}
    answer = await house.call("POST", path("acme/new", "restores"), body={**body, "must_exist": True})
    assert {row["problem"]["code"] for row in answer.json["sandboxes"]} == {"memory-not-found"}


def test_a_service_that_is_killed_in_the_middle_goes_on_under_the_same_key(
    tmp_path: Path, provider_of: Callable[[str], Provider]
) -> None:
    home, provider = plain_home(empty_home(tmp_path / "lead")), provider_of("e2b")
    made = [provider.create() for _ in range(12)]
    body: dict[str, Any] = {"sandboxes": [one.ref for one in made], "read_only": True}
    with serving(tmp_path / "store", tmp_path / "log") as service:
        head = service.export(MEMORY, f"local:{home}").json()["snapshot"]
        provider.server.latency = 0.05

        def ask() -> httpx.Response:
            headers = {"Idempotency-Key": "job"}
            return service.http.post(path(MEMORY, "restores"), json=body, headers=headers)

        def ask_in_vain() -> None:
            with pytest.raises(httpx.TransportError):
                ask()

        caller = threading.Thread(target=ask_in_vain)
        caller.start()
        until(lambda: any((one.home / "MEMORY.md").exists() for one in made))
        service.kill()
        caller.join(60)
        done = sum((one.home / "MEMORY.md").exists() for one in made)
        assert 0 < done < len(made)
        service.start()
        provider.server.latency = 0.0
        answer = ask()
        assert answer.status_code == 207 and answer.json()["complete"], answer.text
        assert {row["receipt"]["snapshot"] for row in answer.json()["sandboxes"]} == {head}
        assert all(without_cache(tree(one.home)) == without_cache(tree(home)) for one in made)
        assert service.http.get(path(MEMORY)).json()["head"] == head
        told = Client(service.url, token=TOKEN).restore_many(MEMORY, sandboxes=body["sandboxes"])
        assert told.complete and {row.receipt.kept for row in told.sandboxes if row.receipt} == {True}


def test_by_command(tmp_path: Path) -> None:
    store, home = tmp_path / "store", plain_home(empty_home(tmp_path / "lead"))
    run_cli("export", "me", f"--sandbox=local:{home}", store=store)
    workers = homes(tmp_path, 2)
    good = [f"--sandbox=local:{one}" for one in workers]
    done = run_cli("restore", "me", *good, "--read-only", store=store)
    assert done.code == 0 and done.document["complete"] and done.document["outcome"] == "complete"
    assert [row["receipt"]["outcome"] for row in done.document["sandboxes"]] == ["complete"] * 2
    failed = run_cli("restore", "me", *good, f"--sandbox=local:{tmp_path / 'nowhere'}", store=store)
    assert failed.code == 1 and not failed.document["complete"]
    assert [row["error"] is None for row in failed.document["sandboxes"]] == [True, True, False]
    assert run_cli("restore", "me", good[0], good[0], store=store).code == 2
