"""Named tokens at the gate: identified, taken up and revoked while the service runs, slowed down, held to their quotas."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sidecar.audit.trail import Trail
from sidecar.errors import AccessDenied, BadConfig, QuotaBytes, QuotaMemories, RateLimited, TokenExpired, UsageError
from sidecar.models.answers import Event
from sidecar.service.access import rates as rates_module
from sidecar.service.access import refusals, usage
from sidecar.service.access.callers import Callers, NoValidToken
from sidecar.service.access.grants import Caller, Quotas, Verb, check_patterns, compile_memories
from sidecar.service.access.rates import Rates
from sidecar.service.access.refusals import FREE, LONGEST_DELAY, MOST_PEERS, Refusals, compute_delay
from sidecar.service.access.token_file import TokenRecord, add_token, parse_token, read_tokens, remove_token
from sidecar.service.access.turns import FairTurns
from sidecar.service.access.usage import Usage
from sidecar.service.api.uploads import Uploads
from sidecar.service.door.tokens import Tokens
from sidecar.service.events import Events
from sidecar.service.operations import Operation, Operations, TooBusy
from tests.parts.homes import empty_home, run_cli, write
from tests.parts.services import path as at
from tests.parts.services import serving, until
from tests.parts.tenants import ADMIN_TOKEN, ROLE, House, path

PLAIN = "a-plain-token-0123456789"


def record(name: str, **more: object) -> TokenRecord:
    given = {"memories": ("acme/*",), "verbs": (Verb.READ,), **more}
    return TokenRecord(id="", name=name, salt="", digest="", **given)  # type: ignore[arg-type]


# Patterns


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        (
            "acme/*",
            ["acme/a", "acme/a/b", "acme/*"],
            ["acme", "acmeX/a", "Acme/a", "acme-a", "globex/acme/a", "acme\n/a"],
        ),
        ("*", ["acme", "acme/a/b", "\u0430"], []),
        ("acme", ["acme"], ["acme/a", "Acme", "acme "]),
        ("acme/agent-*", ["acme/agent-", "acme/agent-7"], ["acme/agent-7/b", "acme/agen"]),
        ("*/notes", ["acme/notes"], ["notes", "acme/x/notes", "acme/notes/x"]),
        ("acme/**", ["acme/a", "acme/a/b"], ["acme"]),
        ("{acme,globex}/*", ["acme/a", "globex/b/c"], ["initech/a", "acme"]),
        ("a.c+me/*", ["a.c+me/x"], ["abc+me/x", "a.ccme/x"]),
    ],
)
def test_a_pattern_matches_whole_ids(pattern: str, inside: list[str], outside: list[str]) -> None:
    covers = compile_memories(check_patterns([pattern]))
    assert [memory for memory in inside if not covers(memory)] == []
    assert [memory for memory in outside if covers(memory)] == []


@pytest.mark.parametrize("pattern", ["", "/", "acme/", "/acme", "acme//x", "acme/../x", ".", "a\nb", "x" * 201, "{a,}"])
def test_a_pattern_that_matches_no_id_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError):
        check_patterns([pattern])


def test_folders_of_the_store_are_told_apart_by_what_their_names_begin_with() -> None:
    from sidecar.ids import build_memory_key

    caller = Caller(name="a", id="1", memories=("acme/*", "Ünï/x*", "plain"))
    for memory in ("acme/a", "acme/" + "long" * 30, "acme/.x", "Ünï/xyz", "plain"):
        assert caller.may_cover_folder(build_memory_key(memory)), memory
    for memory in ("globex/a", "globex", "plain-2", "acm"):
        assert not caller.may_cover_folder(build_memory_key(memory)), memory


# The file


def test_a_token_is_kept_as_a_hash_in_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "state/tokens.json"
    token = add_token(file, record("acme"))
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    text = file.read_text()
    assert token not in text and token.rpartition("_")[2] not in text and parse_token(token) in text
    with pytest.raises(UsageError, match="already"):
        add_token(file, record("acme"))
    other = add_token(file, record("globex", memories=("globex/*",)))
    callers = Callers(Tokens([]), file)
    assert [callers.identify(f"Bearer {one}").name for one in (token, other)] == ["acme", "globex"]
    assert remove_token(file, "acme") and not remove_token(file, "acme")
    assert [one.name for one in read_tokens(file)] == ["globex"]


def test_tokens_that_are_made_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(lambda number: add_token(tmp_path / "t.json", record(f"t{number}")), range(24)))
    callers = Callers(Tokens([]), tmp_path / "t.json")
    assert sorted(callers.identify(f"Bearer {token}").name for token in tokens) == sorted(f"t{n}" for n in range(24))


@pytest.mark.parametrize(
    "contents",
    [
        "",
        "[]",
        '{"format": 2, "tokens": []}',
        '{"format": 1, "tokens": [{"name": "x"}]}',
        '{"format": 1, "tokens": [], "more": 1}',
    ],
)
def test_a_file_that_is_damaged_or_of_a_later_version_is_refused(tmp_path: Path, contents: str) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(contents)
    file.chmod(0o600)
    with pytest.raises(BadConfig):
        Callers(Tokens([]), file)


def test_a_field_that_is_not_known_may_restrict_a_token_so_it_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    add_token(file, record("acme"))
    contents = json.loads(file.read_text())
    contents["tokens"][0]["only_on_sundays"] = True
    file.write_text(json.dumps(contents))
    with pytest.raises(BadConfig, match="damaged"):
        read_tokens(file)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "tokens.json"
    add_token(file, record("acme"))
    file.chmod(mode)
    with pytest.raises(BadConfig, match="changed by others"):
        read_tokens(file)


# Callers


def test_plain_tokens_may_do_everything_and_named_ones_what_they_say(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    token = add_token(file, record("acme"))
    callers = Callers(Tokens([PLAIN]), file)
    admin = callers.identify(f"Bearer {PLAIN}")
    assert (admin.name, admin.restricted, admin.verbs) == ("admin", False, frozenset(Verb))
    acme = callers.identify(f"bearer {token}")
    assert acme.may([Verb.READ], "acme/a") and not acme.may([Verb.READ], "globex/a") and acme.restricted
    with pytest.raises(AccessDenied):
        acme.require(Verb.DELETE, "acme/a")
    id = parse_token(token)
    wrong = [
        *("", "Bearer", f"Basic {token}", f"Bearer {token}x", f"Bearer {token[:-1]}", f"Bearer {token.upper()}", token),
        *(f"Bearer ms_{id}_{'A' * 43}", f"Bearer ms_{'0' * 12}_{token[-43:]}", f"Bearer ms_{id}_", "Bearer ms_"),
    ]
    for authorization in wrong:
        with pytest.raises(NoValidToken):
            callers.identify(authorization)


def test_a_service_without_plain_tokens_is_open_only_where_that_was_said(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    token = add_token(file, record("acme"))
    closed, free = Callers(Tokens([]), file), Callers(Tokens([]), file, open_to_all=True)
    with pytest.raises(NoValidToken):
        closed.identify("")
    assert free.identify("").name == "anyone" and free.identify(f"Bearer {token}").name == "acme"
    remove_token(file, "acme")
    with pytest.raises(NoValidToken):  # revoked, not anyone
        free.identify(f"Bearer {token}")


def test_an_end_is_kept_to(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    over = add_token(file, record("over", expires=time.time() - 1))
    good = add_token(file, record("good", expires=time.time() + 60))
    callers = Callers(Tokens([]), file)
    caller = callers.identify(f"Bearer {good}")
    assert callers.find_current(caller) is not None and callers.find_named("over") is None
    with pytest.raises(TokenExpired):
        callers.identify(f"Bearer {over}")


def test_a_broken_file_leaves_what_it_had_and_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    token = add_token(file, record("acme"))
    callers = Callers(Tokens([]), file)
    told: list[BadConfig] = []
    callers.on_problem = told.append
    whole = file.read_text()
    file.write_text(whole[:-20])
    for _ in range(3):
        assert callers.identify(f"Bearer {token}").name == "acme"
    assert len(told) == 1
    file.write_text(whole)
    later = add_token(file, record("later"))
    assert callers.identify(f"Bearer {later}").name == "later"
    file.unlink()
    with pytest.raises(NoValidToken):
        callers.identify(f"Bearer {later}")
    assert len(told) == 1


# Over HTTP


@pytest.mark.usefixtures("forked_programs")
def test_a_running_service_takes_up_tokens_and_lets_them_go(tmp_path: Path) -> None:
    home, file = empty_home(tmp_path / "home"), tmp_path / "tokens.json"
    write(home / "MEMORY.md", b"# remembered\n")
    env = {"MEMORY_SIDECAR_SERVICE_TOKENS": str(file)}
    create = ("token", "create", "acme", "--memories", "acme/*", "--role", "append-only", "--expires", "1h")
    with serving(tmp_path / "store", tmp_path / "log", env) as service:
        token = run_cli(*create, store=tmp_path / "store", env=env).document["token"]
        mine = {"Authorization": f"Bearer {token}"}
        body = {"sandbox": f"local:{home}"}
        assert service.http.post(at("acme/a", "exports"), json=body, headers=mine).json()["outcome"] == "committed"
        refused = service.http.post(at("globex/a", "exports"), json=body, headers=mine)
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
        listed = run_cli("token", "list", store=tmp_path / "store", env=env).document["tokens"]
        assert [row["name"] for row in listed] == ["acme"] and token not in json.dumps(listed)
        assert run_cli("token", "revoke", "acme", store=tmp_path / "store", env=env).code == 0
        assert service.http.get("/v1/memories", headers=mine).status_code == 401
        counted = [
            line
            for line in service.http.get("/metrics").text.splitlines()
            if line.startswith("memory_sidecar_refused_calls_total")
        ]
        assert counted == [f'memory_sidecar_refused_calls_total{{status="{status}"}} 1.0' for status in ("403", "401")]
        until(lambda: [line for line in service.lines() if line["event"].startswith("calls are refused")][1:])
    assert token not in (tmp_path / "log").read_text()


def test_beyond_loopback_a_named_token_is_enough_and_without_any_it_does_not_start(tmp_path: Path) -> None:
    env = {"MEMORY_SIDECAR_SERVICE_TOKENS": str(tmp_path / "tokens.json")}
    token = add_token(tmp_path / "tokens.json", record("acme"))
    with serving(tmp_path / "s", tmp_path / "log", env, given_token="", bind="0.0.0.0:0") as service:
        assert service.http.get("/v1/memories").status_code == 401
        assert service.http.get("/v1/memories", headers={"Authorization": f"Bearer {token}"}).status_code == 200
    remove_token(tmp_path / "tokens.json", "acme")
    checked = run_cli(
        "config", "check", "--bind=0.0.0.0:0", store=tmp_path / "s", env={**env, "MEMORY_SIDECAR_TOKEN": ""}
    )
    assert checked.code != 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["create", "acme"], "needs memories"),
        (["create", "acme", "--memories=acme/*"], "a role, or verbs"),
        (["create", "acme", "--memories=acme/*", "--role=read-only", "--verbs=read"], "a role, or verbs"),
        (["create", "acme", "--memories=acme/*", "--verbs=reed"], "no verb"),
        (["create", "acme", "--memories=acme/*", "--verbs=admin"], "every memory"),
        (["create", "Acme", "--memories=acme/*", "--role=read-only"], "no name for a token"),
        (["create", "admin", "--memories=acme/*", "--role=read-only"], "no name for a token"),
        (["create", "acme", "--memories=acme/*", "--role=read-only", "--expires=soon"], "no end"),
        (["create", "acme", "--memories=acme/*", "--role=read-only", "--expires=2020-01-01"], "is over"),
        (["create", "acme", "--memories=acme/*", "--role=read-only", "--max-bytes=much"], "no size"),
        (["create", "acme", "--memories=acme/*", "--role=read-only", "--concurrent=0"], "at least 1"),
        (["create"], "needs a name"),
        (["revoke", "acme"], "no token"),
    ],
)
def test_a_token_that_makes_no_sense_is_not_made(tmp_path: Path, words: list[str], said: str) -> None:
    env = {"MEMORY_SIDECAR_SERVICE_TOKENS": str(tmp_path / "tokens.json")}
    ran = run_cli("token", *words, store=tmp_path / "store", env=env)
    assert ran.code == 2 and said in ran.document["error"]["message"], ran.document
    assert not (tmp_path / "tokens.json").exists()


# Refused calls


async def test_refusals_are_slowed_down_by_peer_and_nobody_else_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [compute_delay(count) for count in (1, FREE)] == [0.0, 0.0]
    assert 0 < compute_delay(FREE + 1) < compute_delay(FREE + 3) <= LONGEST_DELAY == compute_delay(10**6)
    slept: list[float] = []

    async def wait(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(refusals, "wait", wait)
    counted: list[int] = []
    events = Events()
    now = [0.0]
    refused = Refusals(events, counted.append, clock=lambda: now[0])
    for _ in range(FREE + 3):
        assert await refused.refuse(401, "10.0.0.1")
    assert slept == [compute_delay(FREE + more) for more in (1, 2, 3)] and counted == [401] * (FREE + 3)
    await refused.refuse(403, "10.0.0.2")
    assert len(slept) == 3, "another peer does not wait"
    for host in range(FREE + 1):  # one host has a whole network of IPv6
        await refused.refuse(401, f"2001:db8::{host}")
    assert len(slept) == 4
    now[0] += 3600
    await refused.refuse(401, "10.0.0.1")
    assert len(slept) == 4, "after a while a peer begins anew"
    # However many there are, they are told once a minute, and only so many are remembered.
    for number in range(MOST_PEERS + 50):
        await refused.refuse(401, f"10.1.{number // 256}.{number % 256}")
    assert len(refused._peers) <= MOST_PEERS
    assert [event.type for event in events.recent] == ["access.refused"] * 2
    assert events.recent[1].details["refused"] == {"401": FREE + 3 + FREE + 1, "403": 1}


async def test_refusals_that_wait_are_few_so_that_connections_are_left() -> None:
    refused = Refusals(Events(), lambda status: None)
    for _ in range(FREE):
        await refused.refuse(401, "10.0.0.1")
    waiting = [asyncio.create_task(refused.refuse(401, "10.0.0.1")) for _ in range(50)]
    await asyncio.sleep(0.01)
    assert sum(not task.done() for task in waiting) == refusals.MOST_WAITING_OF_ONE
    assert all(task.result() is False for task in waiting if task.done())
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert refused._waiting == 0


async def test_a_right_token_never_waits_for_wrong_ones_at_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, over = House(tmp_path), asyncio.Event()

    async def wait(seconds: float) -> None:
        await over.wait()

    monkeypatch.setattr(refusals, "wait", wait)
    token = house.grant("acme", ["acme/*"], ROLE["read-only"])
    wrong = [asyncio.create_task(house.call("GET", "/v1/memories", "wrong" * 8)) for _ in range(40)]
    for right in (token, ADMIN_TOKEN):
        assert (await house.call("GET", "/v1/memories", right)).status == 200
    assert sum(not task.done() for task in wrong) == refusals.MOST_WAITING_OF_ONE
    over.set()
    replies = await asyncio.gather(*wrong)
    assert {reply.status for reply in replies} == {401}
    assert {reply.headers.get("connection") for reply in replies} == {None, "close"}
    await house.sidecar.close()


# Quotas


def caller(id: str = "1", memories: tuple[str, ...] = ("acme/*",), **quotas: int) -> Caller:
    return Caller(name=f"t{id}", id=id, memories=memories, quotas=Quotas(**quotas))


async def test_so_many_calls_a_minute_and_then_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates_module, "LONGEST_DELAY", 0.0)
    now = [0.0]
    rates, acme = Rates(600, clock=lambda: now[0]), caller(calls_per_minute=30)

    async def call(who: Caller) -> None:
        async with rates.count_call(who):
            pass

    for _ in range(30):
        await call(acme)
    with pytest.raises(RateLimited) as limited:
        await call(acme)
    assert limited.value.seconds == pytest.approx(2.0)
    await call(caller("2", calls_per_minute=30))  # another token
    await call(Caller(name="admin"))
    now[0] += 2.0
    await call(acme)


async def test_one_token_cannot_have_all_connections() -> None:
    rates, acme = Rates(160), caller()
    release = asyncio.Event()

    async def hang() -> None:
        async with rates.count_call(acme):
            await release.wait()

    hanging = [asyncio.create_task(hang()) for _ in range(20)]
    await asyncio.sleep(0)
    with pytest.raises(RateLimited):
        async with rates.count_call(acme):
            pass
    async with rates.count_call(caller("2")):
        pass
    release.set()
    await asyncio.gather(*hanging)
    async with rates.count_call(acme):
        pass


def test_one_token_cannot_have_all_uploads() -> None:
    uploads = Uploads(4)
    with uploads._count_upload("1"), uploads._count_upload("1"):
        with pytest.raises(TooBusy), uploads._count_upload("1"):
            pass
        with uploads._count_upload("2"), uploads._count_upload(""), pytest.raises(TooBusy), uploads._count_upload("3"):
            pass
    with uploads._count_upload(""), uploads._count_upload(""), uploads._count_upload(""), uploads._count_upload(""):
        pass
    assert not uploads._open


async def test_a_call_too_many_is_a_429_that_says_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates_module, "LONGEST_DELAY", 0.0)
    house = House(tmp_path)
    token = house.grant("acme", ["acme/*"], ROLE["read-only"], calls_per_minute=2)
    replies = [await house.call("GET", "/v1/memories", token) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert replies[2].code == "rate-limited" and 25 <= int(replies[2].headers["retry-after"]) <= 30
    await house.sidecar.close()


async def test_turns_are_shared_between_owners() -> None:
    turns, order = FairTurns(2), list[str]()
    gate = asyncio.Event()

    async def work(owner: str, name: str, most: int = 0) -> None:
        async with turns.held(owner, most):
            order.append(name)
            await gate.wait()
            await asyncio.sleep(0)

    greedy = [asyncio.create_task(work("a", f"a{number}")) for number in range(6)]
    await asyncio.sleep(0)
    other = [asyncio.create_task(work("b", f"b{number}")) for number in range(2)]
    await asyncio.sleep(0)
    assert order == ["a0", "a1"]
    gate.set()
    await asyncio.gather(*greedy, *other)
    assert order.index("b0") == 2 and order.index("b1") < order.index("a4"), order


async def test_an_owner_holds_at_most_its_own_number_of_turns_and_a_cancelled_one_none() -> None:
    turns, running, most = FairTurns(4), [0], [0]

    async def work() -> None:
        async with turns.held("a", 2):
            running[0] += 1
            most[0] = max(most[0], running[0])
            await asyncio.sleep(0.001)
            running[0] -= 1

    tasks = [asyncio.create_task(work()) for _ in range(20)]
    await asyncio.sleep(0.002)
    for task in tasks[5:15]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most[0] == 2 and turns._free == 4 and not turns._held and not turns._waiting


async def test_operations_of_one_token_leave_turns_and_room_to_others() -> None:
    operations = Operations(Events(), Trail(), concurrency=3, queue=125)
    release, ran = asyncio.Event(), list[str]()

    async def work(operation: Operation) -> object:
        ran.append(operation.caller.name)
        await release.wait()
        raise UsageError("enough")

    greedy, other = caller("1"), caller("2", concurrent=1)
    for number in range(16):
        operations.start(Operation("export", f"acme/{number}", "e2b:x", caller=greedy), work)  # type: ignore[arg-type]
    with pytest.raises(TooBusy):
        operations.start(Operation("export", "acme/x", "e2b:x", caller=greedy), work)  # type: ignore[arg-type]
    for number in range(2):
        operations.start(Operation("export", f"globex/{number}", "e2b:x", caller=other), work)  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert sorted(ran) == ["t1", "t1", "t2"]
    release.set()
    await operations.drain(10)


@pytest.fixture
async def stored(tmp_path: Path) -> AsyncIterator[House]:
    house = House(tmp_path)
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# remembered\n" * 100)
    body = {"sandbox": f"local:{home}"}
    assert (await house.call("POST", path("acme/a", "exports"), body=body)).json["outcome"] == "committed"
    yield house
    await house.sidecar.close()


def count_bytes(house: House, folder: str) -> int:
    return sum(file.stat().st_size for file in (house.store / "memories").glob(f"*{folder}*/**/*") if file.is_file())


@pytest.mark.usefixtures("forked_programs")
async def test_stored_bytes_are_held_to_the_quota(stored: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house, listings = stored, [0]
    await house.copy("acme/a", "globex/a")
    used = count_bytes(house, "acme-a")
    token = house.grant("acme", ["acme/*"], ROLE["append-only"], max_bytes=used + 3000)
    listing = house.sidecar.admission.usage._list_store

    async def counted(**how: float) -> object:
        listings[0] += 1
        return await listing(**how)

    monkeypatch.setattr(house.sidecar.admission.usage, "_list_store", counted)
    home = house.folder / "home"
    outcomes = []
    for number in range(12):
        write(home / "MEMORY.md", bytes(f"# {number}\n", "ascii") + bytes(range(256)) * number)
        reply = await house.call("POST", path("acme/a", "exports"), token, {"sandbox": f"local:{home}"})
        outcomes.append(reply.json["outcome"] if reply.status == 200 else reply.code)
        if reply.status == 200 and reply.json["outcome"] == "rejected":
            assert reply.json["reason"]["code"] == "quota-bytes" and reply.json["snapshot"] is None
    assert outcomes[0] == "committed" and "rejected" in outcomes and "quota-bytes" not in outcomes[:2]
    assert count_bytes(house, "acme-a") <= used + 3000
    assert listings[0] == 1, "however often it was asked"
    # A fork would take too much too; others are not concerned.
    fork = await house.call("POST", path("acme/a", "forks"), token, {"memory": "acme/b"})
    assert (fork.status, fork.code) == (507, "quota-bytes")
    free = house.grant("globex", ["globex/*"], ROLE["append-only"])
    assert (await house.call("POST", path("globex/a", "forks"), free, {"memory": "globex/b"})).status == 201
    # What is deleted counts no more.
    await house.copy("globex/a", "acme/c")
    assert (await house.call("DELETE", path("acme/a"))).status == 200
    assert (await house.call("POST", path("acme/c", "forks"), token, {"memory": "acme/b"})).status == 201


async def test_who_has_used_up_a_quota_is_told_after_a_while(stored: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who repeats its calls at once would keep the service busy with refusing them."""
    waited: list[str] = []

    async def wait(rates: Rates, caller: Caller, seconds: float = 1.0) -> None:
        waited.append(caller.name)

    monkeypatch.setattr(Rates, "hold_back", wait)
    token = stored.grant("acme", ["acme/*"], ROLE["append-only"], max_bytes=1)
    for _ in range(3):
        reply = await stored.call("POST", path("acme/a", "exports"), token, {"sandbox": "local:/nonexistent"})
        assert (reply.status, reply.code) == (507, "quota-bytes")
    assert waited == ["acme"] * 3


@pytest.mark.usefixtures("forked_programs")
async def test_the_number_of_memories_is_held_to_the_quota(stored: House) -> None:
    house, body = stored, {"sandbox": f"local:{stored.folder / 'home'}"}
    token = house.grant("acme", ["acme/*"], (*ROLE["append-only"], Verb.DELETE), max_memories=2)
    missing = await house.call("POST", path("acme/x", "exports"), token, {"sandbox": "local:/nonexistent/home"})
    assert missing.status in (404, 410), "what failed does not count"
    assert (await house.call("POST", path("acme/a", "forks"), token, {"memory": "acme/b"})).status == 201
    for reply in (
        await house.call("POST", path("acme/c", "exports"), token, body),
        await house.call("POST", path("acme/a", "forks"), token, {"memory": "acme/c"}),
    ):
        assert (reply.status, reply.code) == (507, "quota-memories")
    assert (await house.call("POST", path("acme/a", "exports"), token, body)).status == 200
    assert (await house.call("DELETE", path("acme/b"), token)).status == 200
    assert (await house.call("POST", path("acme/a", "forks"), token, {"memory": "acme/c"})).status == 201


@pytest.mark.usefixtures("forked_programs")
async def test_checkpoints_are_held_to_the_quota_of_who_attached(stored: House) -> None:
    house, home = stored, stored.folder / "home"
    await house.keeper.lease.renew()
    token = house.grant("acme", ["acme/*"], ROLE["append-only"], max_bytes=count_bytes(house, "acme-a") + 100)
    body = {"sandbox": f"local:{home}", "checkpoint_every": 3600}
    assert (await house.call("PUT", path("acme/a", "attachment"), token, body)).status == 200
    write(home / "MEMORY.md", bytes(range(256)) * 40)
    receipt = await house.keeper.save(("acme/a", f"local:{home}"), "checkpoint")
    assert receipt.outcome == "rejected" and receipt.reason is not None and receipt.reason.code == "quota-bytes"
    problem = (await house.call("GET", path("acme/a", "attachment"), token)).json["attachment"]["problem"]
    assert problem.startswith("rejected (quota-bytes)")


async def test_the_count_is_refreshed_and_never_refuses_by_an_old_one(stored: House) -> None:
    assert stored.engine is not None
    now = [1000.0]
    counting = Usage(stored.engine.repository.store, clock=lambda: now[0])
    most = count_bytes(stored, "acme-a")
    acme = caller(bytes=most + 10)
    await counting.check(acme, "acme/a", 10)
    with pytest.raises(QuotaBytes):
        await counting.check(acme, "acme/a", 11)
    # Another service stores something: known after a while, and before it is refused.
    await stored.copy("acme/a", "acme/b")
    await counting.check(acme, "acme/a", 10)
    now[0] += usage.STALE_SECONDS
    await counting.check(acme, "acme/a", 10)  # still by the old one; it is counted again in the background
    await asyncio.sleep(0.1)
    with pytest.raises(QuotaBytes):
        await counting.check(acme, "acme/a", 10)
    # It removes it again.
    await stored.engine.repository.delete_memory("acme/b")
    now[0] += usage.FRESH_SECONDS
    await counting.check(acme, "acme/a", 10)
    # Charged is counted at once, and taken back when nothing came of it.
    await counting.charge(acme, "acme/new", 10)
    with pytest.raises(QuotaBytes):
        await counting.check(acme, "acme/a", 1)
    counting.count(Event(number=1, type="export.failed", at="", memory="acme/new"))
    await counting.check(acme, "acme/a", 10)
    few = Caller(name="t", id="9", memories=("acme/*",), quotas=Quotas(memories=1))
    await counting.check(few, "acme/a")
    with pytest.raises(QuotaMemories):
        await counting.check(few, "acme/new")
