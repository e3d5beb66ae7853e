"""Tenants of one service: with a token for ``acme/*``, nothing outside of it is read, changed, listed, suggested or counted,
whatever is asked and however it is written. The routes come from the OpenAPI document, so new ones are tried by themselves."""

from __future__ import annotations

import io
import json
import re
import secrets
import tarfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from fastapi import Depends, FastAPI

from sidecar.engine import ExportRequest, export
from sidecar.errors import SidecarError
from sidecar.policy.local_folders import LocalPolicy
from sidecar.service.access import refusals
from sidecar.service.access.grants import ADMIN, Verb
from sidecar.service.api.access import check_access, needs
from sidecar.service.api.app import OPEN_TO_ALL
from sidecar.service.api.problems import on_sidecar_error
from sidecar.service.attachments.attachment import CareOptions
from tests.parts.homes import empty_home, engine_at, write
from tests.parts.searched import Searched, index_of
from tests.parts.tenants import ADMIN_TOKEN, EVERY_VERB, ROLE, House, Reply, path

pytestmark = pytest.mark.usefixtures("forked_programs")

OWN = "acme/agent-7"
FOREIGN = ("globex/vault", "globex", "acme", "acmeX/agent-7", "Acme/agent-7", "acme-agent-7", "\u0430cme/agent-7")
"""Memories of others: a twin in Cyrillic, one whose folder begins like ours, and one that is only called like the tenant."""
MARKS = ("globex", "vault", "acmeX", "Acme/", "acme-agent", "\u0430cme", "\\u0430cme", "plugh", "xyzzy")
"""What names a memory of others, or stands in one."""
TRICKS = (
    *("globex%2Fvault", "%67lobex%2Fvault", "globex", "acme", "acmeX%2Fagent-7", "Acme%2Fagent-7", "ACME%2Fagent-7"),
    *("acme-agent-7", "%D0%B0cme%2Fagent-7", "acme%2F..%2Fglobex%2Fvault", "acme%2F%2E%2E%2Fglobex", "acme/../globex"),
    *("acme%2F..", "acme%2F.", "acme%2F", "acme/", "%2Facme%2Fagent-7", "acme%2F%2Fagent-7", "", ".", "..", "%2e%2e"),
    *("acme%252Fagent-7", "acme%252F..%252Fglobex", "acme%5Cagent-7", "acme%5C..%5Cglobex", "acme%00", "acme%2Fx%00"),
    *("acme%EF%BC%8Fagent-7", "acme%E2%88%95agent-7", "acme%E2%81%84agent-7", "acme%EE%80%80agent-7", "%EE%80%80"),
    *("globex%2Fvault%3Facme%2F", "globex%2Fvault%23acme%2F", "globex%2Fvault;acme%2F", "acme%2F%ff", "%ff", "*", "**"),
    *("acme%0A%2Fagent-7", "%20acme%2Fagent-7", "acme%20%2Fagent-7", "acme%E2%80%8B%2Fagent-7", "acm%D0%B5%2Fagent-7"),
    *("globex%2F..%2Facme%2Fagent-7", "{acme,globex}%2Fvault", "acme|globex", "a" * 201, "acme%2F" + "a" * 200),
)
"""How a memory outside of ``acme/*`` may be written in a path, or what may be mistaken for one inside."""


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "LONGEST_DELAY", 0.0)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = House(tmp_path)
    await house.keeper.lease.renew()
    await settle(house)
    yield house
    await house.sidecar.close()


async def settle(house: House) -> None:
    """Memories of several tenants, an attached sandbox and an operation of another, calls under keys."""
    home = empty_home(house.folder / "globex-home")
    write(home / "MEMORY.md", b"# the magic words are xyzzy and plugh\n")
    exported = await house.call(
        "POST",
        path(FOREIGN[0], "exports"),
        body={"sandbox": f"local:{home}", "label": "plugh", "conversation": "xyzzy"},
        headers={"idempotency-key": "guess-me"},
    )
    assert exported.json["outcome"] == "committed", exported.body
    for memory in FOREIGN[1:]:
        await house.copy(FOREIGN[0], memory)
    mine = empty_home(house.folder / "acme-home")
    write(mine / "MEMORY.md", b"# what acme knows\n")
    assert (await house.call("POST", path(OWN, "exports"), body={"sandbox": f"local:{mine}"})).status == 200
    await house.keeper.look_after((FOREIGN[0], f"local:{home}"), CareOptions(lasting=True, conversation="xyzzy"))


def foreign_operation(house: House) -> str:
    return next(one.id for one in house.sidecar.operations._known.values() if one.memory == FOREIGN[0])


async def foreign_snapshot(house: House) -> str:
    return str((await house.call("GET", path(FOREIGN[0]))).json["head"])


class Routes:
    """Every route of the OpenAPI document, with a request for each."""

    def __init__(self, document: dict[str, Any], home: Path) -> None:
        self._schemas = document["components"]["schemas"]
        self._home = home
        self.all = [
            (method.upper(), template, operation)
            for template, operations in document["paths"].items()
            for method, operation in operations.items()
            if template not in ("/v1/events", *OPEN_TO_ALL)  # a stream does not end
            and not template.startswith("/v1/hooks/")  # checks by itself who calls: test_hooks.py
        ]

    def body(self, operation: dict[str, Any], **values: Any) -> tuple[Any, dict[str, str]]:
        """A body by the example in the document, with these values, and its headers."""
        content = operation.get("requestBody", {}).get("content", {})
        if not content:
            return None, {}
        if "application/json" not in content:
            return _tarball(), {"content-type": "application/gzip"}
        name = content["application/json"]["schema"].get("$ref", "").rpartition("/")[2] or "AcceptanceBody"
        example = dict(self._schemas[name]["examples"][0])
        given = {"sandbox": f"local:{self._home}", **values}
        return {
            **example,
            **{key: value for key, value in given.items() if key in self._schemas[name]["properties"]},
        }, {}


def _tarball() -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        member = tarfile.TarInfo("MEMORY.md")
        member.size = 8
        tar.addfile(member, io.BytesIO(b"# a note"))
    return whole.getvalue()


def fill(template: str, **values: str) -> str:
    return re.sub(
        r"\{(\w+)\}",
        lambda found: {"path": "project/MEMORY.md", "ref": "local:%2Fnowhere", **values}[found[1]],
        template,
    )


async def routes_of(house: House) -> Routes:
    document = (await house.call("GET", "/openapi.json")).json
    return Routes(document, house.folder / "acme-home")


def unmarked(reply: Reply, asked: str) -> None:
    """Nothing of others is in an answer, but for what the question itself said."""
    text = reply.body.decode("utf-8", "replace")
    found = [mark for mark in MARKS if mark in text and mark not in asked]
    assert found == [], (asked, text)


async def test_nothing_outside_is_reached_by_any_route_verb_or_spelling(house: House) -> None:
    tokens = [house.grant("acme", ["acme/*"], EVERY_VERB), house.grant("acme-2", ["acme/*"], ROLE["export-restore"])]
    routes, snapshot, before = await routes_of(house), await foreign_snapshot(house), house.digest()
    tried = 0
    for method, template, operation in routes.all:
        if "{memory}" not in template:
            continue
        body, headers = routes.body(operation, snapshot=snapshot, memory="acme/new")
        for trick in TRICKS:
            for token in tokens:
                place = fill(template, memory=trick, snapshot=snapshot, id="x")
                reply = await house.call(method, place, token, body, headers=headers)
                assert 400 <= reply.status < 500, (method, place, reply.status, reply.body)
                unmarked(reply, f"{place} {body}")
                tried += 1
    assert tried > 1500
    assert house.digest() == before


async def test_a_memory_of_others_answers_as_one_that_is_not_there(house: House) -> None:
    routes = await routes_of(house)
    asked = 0
    for name, verbs in (("acme", EVERY_VERB), ("acme-2", ROLE["export-restore"]), ("acme-3", ROLE["read-only"])):
        token = house.grant(name, ["acme/*"], verbs)
        for method, template, operation in routes.all:
            if "{memory}" not in template:
                continue
            body, headers = routes.body(operation, memory="acme/new")
            there, not_there = [
                await house.call(
                    method, fill(template, memory=memory, snapshot="latest", id="x"), token, body, headers=headers
                )
                for memory in ("globex%2Fvault", "globex%2Fnothing")
            ]
            assert (there.status, there.body) == (not_there.status, not_there.body) and there.status == 403
            asked += 1
    assert asked > 50


async def test_inside_every_route_works_and_tells_nothing_of_others(house: House) -> None:
    """Each route on a memory of its own, with what belongs to others wherever something can be named."""
    token = house.grant("acme", ["acme/*"], EVERY_VERB)
    routes, snapshot = await routes_of(house), await foreign_snapshot(house)
    await diverge(house)
    operation_id, theirs = foreign_operation(house), f"local:{house.folder / 'globex-home'}"
    before = {memory: (await house.call("GET", path(memory, "snapshots"))).body for memory in FOREIGN}
    worked: set[str] = set()
    ref = f"local:{house.folder / 'acme-home'}".replace("/", "%2F")
    refused = await house.call("GET", f"/v1/sandboxes/{theirs.replace('/', '%2F')}", token)
    assert refused.status == 403, "the sandbox of another tenant"
    for number, (method, template, operation) in enumerate(routes.all):
        memory = OWN
        if (method, template) == ("DELETE", "/v1/memories/{memory}"):
            await house.copy(OWN, memory := "acme/doomed")
        own = await diverge(house) if template.endswith(("/acceptances", "/declines")) else "latest"
        bodies = [{"snapshot": named} for named in (own, snapshot)]
        bodies += [{"memory": FOREIGN[0]}, {"memory": "globex/new"}, {"sandbox": theirs}]
        queries = [f"{name}={theirs}" for name in ("sandbox", "memory", "q", "label")]
        queries += [f"{name}={snapshot}" for name in ("from", "to")]
        queries += ["path=project/MEMORY.md", f"with={FOREIGN[0]}"]
        asked = [(values, "") for values in bodies] + [({}, query) for query in queries]
        for values, query in asked:
            body, headers = routes.body(operation, **{"memory": f"acme/new-{number}", "snapshot": "latest", **values})
            for named in ("latest", snapshot) if "{snapshot}" in template else ("latest",):
                place = fill(template, memory=memory.replace("/", "%2F"), snapshot=named, id=operation_id, ref=ref)
                reply = await house.call(method, place, token, body, query=query, headers=headers)
                assert reply.status < 500, (method, place, reply.body)
                unmarked(reply, f"{place} {body} {query}")
                if reply.status < 300:
                    worked.add(f"{method} {template}")
    known = {f"{method} {template}" for method, template, _ in routes.all}
    # Without a search database there is nothing to search, metrics are about all, and no operation of its own was named.
    # Sandboxes are created by administrators alone.
    sandboxes = {f"{method} /v1/memories/{{memory}}/sandboxes" for method in ("POST", "DELETE")}
    sandboxes |= {"POST /v1/memories/{memory}/moves"}
    assert known - worked == {"GET /v1/search", "GET /metrics", "GET /v1/operations/{id}"} | sandboxes
    after = {memory: (await house.call("GET", path(memory, "snapshots"))).body for memory in FOREIGN}
    assert after == before
    assert (await house.call("GET", path(FOREIGN[0], "attachment"))).status == 200


async def diverge(house: House) -> str:
    """Give the tenant's memory a second snapshot, and one beside the head, which is returned."""
    home = house.folder / "acme-home"
    assert house.engine is not None
    sandbox = house.engine.open_sandbox(f"local:{home}")
    for beside in (False, True):
        write(home / "MEMORY.md", f"# {beside} {secrets.token_hex(8)}\n".encode())
        receipt = await export(house.engine, sandbox, ExportRequest(memory=OWN, beside=beside, force=not beside))
    assert receipt.outcome == "diverged"
    return str(receipt.snapshot)


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE", "PATCH", "CONNECT", "get"])
async def test_other_methods_reach_nothing(house: House, method: str) -> None:
    token, routes, before = house.grant("acme", ["acme/*"], EVERY_VERB), await routes_of(house), house.digest()
    for template in {template for _, template, _ in routes.all}:
        for memory in ("globex%2Fvault", "acme%2Fagent-7"):
            reply = await house.call(method, fill(template, memory=memory, snapshot="latest", id="x"), token)
            assert reply.status in (403, 404, 405), (method, template, reply.status)
            unmarked(reply, memory)
    assert house.digest() == before


async def test_a_role_may_do_what_it_says_and_no_more(house: House) -> None:
    routes = await routes_of(house)
    home = f"local:{house.folder / 'acme-home'}"
    allowed: dict[str, set[str]] = {}
    for role in ("append-only", "read-only", "export-restore"):
        token = house.grant(role, ["acme/*"], ROLE[role])
        allowed[role] = set()
        for method, template, operation in routes.all:
            body, headers = routes.body(operation, memory="acme/forked")
            place = fill(template, memory="acme%2Fagent-7", snapshot="latest", id="x")
            reply = await house.call(method, place, token, body, headers=headers)
            if reply.status != 403:
                allowed[role].add(f"{method} {template.replace('/v1/memories/{memory}', '…')}")
        forced = [
            ("exports", {"sandbox": home, "force": True}),
            ("exports", {"sandbox": home, "allow": ["shrunk"]}),
            ("restores", {"sandbox": home, "force": True}),
            ("restores", {"sandbox": home, "discard": True}),
        ]
        for verb, body in forced:
            refused = await house.call("POST", path(OWN, verb), token, body)
            assert (refused.status, refused.code) == (403, "forbidden")
        refused = await house.call(
            "POST",
            path(OWN, "archives"),
            token,
            _tarball(),
            query="allow=shrunk",
            headers={"content-type": "application/gzip"},
        )
        assert refused.status == 403
    reading = {
        "GET /v1/memories",
        "GET …",
        "GET …/snapshots",
        "GET …/snapshots/{snapshot}",
        "GET …/diff",
        "GET /v1/search",
    }
    reading |= {f"GET …/snapshots/{{snapshot}}/{name}" for name in ("archive", "records", "brief", "files/{path}")}
    reading |= {"GET …/history", "GET …/blame"}
    looking = {"GET …/attachment", "GET /v1/attachments", "GET /v1/operations/{id}"}
    saving = {"POST …/exports", "POST …/restores", "POST …/archives", "PUT …/attachment", "DELETE …/attachment"}
    assert allowed["read-only"] == reading | looking
    asking = {"GET /v1/sandboxes/{ref}"}
    assert allowed["export-restore"] == saving | looking | asking
    assert allowed["append-only"] == reading | looking | saving | asking | {"POST …/forks"}


async def test_every_route_is_declared_and_one_that_is_not_is_refused(house: House) -> None:
    routes = await routes_of(house)
    for method, template, operation in routes.all:
        body, headers = routes.body(operation, sandbox="e2b:nowhere")
        place = fill(template, memory="nothing", snapshot="latest", id="x")
        reply = await house.call(method, place, body=body, headers=headers)
        assert reply.status != 403, f"{method} {template} has no declared verb: put @needs(…) below its decorator"
    for open_path in OPEN_TO_ALL:
        assert (await house.call("GET", open_path, token="")).status in (200, 503)
    app = FastAPI(dependencies=[Depends(check_access)])
    app.add_exception_handler(SidecarError, on_sidecar_error)

    @app.get("/undeclared")
    async def undeclared() -> str:
        return "let in"

    @app.get("/declared/{memory}")
    @needs(Verb.READ)
    async def declared() -> str:
        return "let in"

    async def status(place: str, state: dict[str, Any]) -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        await app({**house._scope("GET", place, "", {}, ""), "state": state}, receive, send)
        return int(sent[0]["status"])

    assert await status("/undeclared", {"caller": ADMIN}) == 403
    assert await status("/declared/m", {"caller": ADMIN}) == 200
    assert await status("/declared/m", {}) == 403, "without the gate nobody is let in"


async def test_lists_hold_what_the_token_may_see(house: House) -> None:
    acme, globex = (
        house.grant("acme", ["acme/*"], ROLE["append-only"]),
        house.grant("globex", ["globex/*"], ROLE["read-only"]),
    )
    listed = {
        token: [row["memory"] for row in (await house.call("GET", "/v1/memories", token)).json["memories"]]
        for token in (acme, globex, ADMIN_TOKEN)
    }
    assert listed == {acme: [OWN], globex: ["globex/vault"], ADMIN_TOKEN: sorted([OWN, *FOREIGN])}
    attached = {
        token: [row["memory"] for row in (await house.call("GET", "/v1/attachments", token)).json["attachments"]]
        for token in (acme, globex, ADMIN_TOKEN)
    }
    assert attached == {acme: [], globex: ["globex/vault"], ADMIN_TOKEN: ["globex/vault"]}


@pytest.mark.parametrize("must_exist", [False, True])
async def test_only_own_memories_are_suggested_as_look_alikes(house: House, must_exist: bool) -> None:
    home = empty_home(house.folder / "fresh")
    token = house.grant("acme", ["acme/*"], ROLE["export-restore"])
    said = []
    for memory in ("acme/agent-6", "acme/agnet-7", "acme/vault"):
        body = {"sandbox": f"local:{home}", "must_exist": must_exist, "attach": False}
        reply = await house.call("POST", path(memory, "restores"), token, body)
        unmarked(reply, memory)
        said.append(reply.json["detail"] if must_exist else " ".join(reply.json["warnings"]))
    assert "Is it 'acme/agent-7'?" in said[1]
    assert "Is it" not in said[2]
    # Whoever may see all is told of all.
    body = {"sandbox": f"local:{home}", "attach": False}
    told = await house.call("POST", path("acmeX/agent-6", "restores"), body=body)
    assert "acmeX/agent-7" in " ".join(told.json["warnings"])


async def test_a_sandbox_of_others_can_be_neither_exported_nor_restored_into(house: House) -> None:
    token = house.grant("acme", ["acme/*"], EVERY_VERB)
    theirs = {"sandbox": f"local:{house.folder / 'globex-home'}"}
    for method, rest in (("POST", "exports"), ("POST", "restores"), ("PUT", "attachment")):
        refused = await house.call(method, path(OWN, rest), token, theirs)
        assert (refused.status, refused.code) == (403, "forbidden"), refused.body
        unmarked(refused, str(theirs))
    named = {"sandbox": f"local:{house.folder / 'acme-home'}", "projects": [str(house.folder / "globex-home")]}
    assert (await house.call("POST", path(OWN, "exports"), token, named)).code == "root-outside"
    # Also once it is not looked after any more: its own notes say whose memory it holds.
    await house.keeper.forget_memory(FOREIGN[0])
    await house.keeper.find_all()
    for force in ({}, {"force": True}, {"allow": ["other-memory"]}, {}):
        refused = await house.call("POST", path(OWN, "exports"), token, {**theirs, **force})
        assert (refused.status, refused.code) == (403, "sandbox-not-allowed"), refused.body
    assert len((await house.call("GET", path(OWN, "snapshots"))).json["snapshots"]) == 1
    # What is unsaved there is not saved to a memory of others, nor lost.
    write(house.folder / "globex-home/MEMORY.md", b"# unsaved: xyzzy\n")
    kept = await house.call("POST", path(OWN, "restores"), token, {**theirs, "attach": False})
    assert (kept.json["outcome"], kept.json["reason"]["code"]) == ("incomplete", "unsaved")
    unmarked(kept, str(theirs))
    assert len((await house.call("GET", path(FOREIGN[0], "snapshots"))).json["snapshots"]) == 1
    assert "unsaved" in (house.folder / "globex-home/MEMORY.md").read_text()


async def test_a_token_may_be_for_some_sandboxes_only(house: House) -> None:
    own = house.folder / "acme-home"
    token = house.grant("acme", ["acme/*"], EVERY_VERB, sandboxes=(f"local:{own}*", "e2b:*"))
    (house.folder / "acme-home-link").symlink_to(house.folder / "globex-home")
    for ref in (
        f"local:{own}/../globex-home",
        f"local:{house.folder}/acme-home-link",
        "daytona:box",
        f"local:{house.folder}",
    ):
        refused = await house.call("POST", path(OWN, "exports"), token, {"sandbox": ref})
        assert (refused.status, refused.code) == (403, "forbidden"), (ref, refused.body)
    assert (await house.call("POST", path(OWN, "exports"), token, {"sandbox": f"local:{own}"})).status == 200


async def test_no_project_and_no_link_leads_a_token_out_of_its_sandboxes(tmp_path: Path) -> None:
    folder = tmp_path.resolve()
    local = LocalPolicy(roots=(str(folder / "srv"),))
    house = House(tmp_path, engine=replace(engine_at(tmp_path / "store"), local=local))
    await house.keeper.lease.renew()
    theirs, mine, shared = (folder / "srv" / name for name in ("victim/home", "acme/home", "acme/app"))
    for place in (theirs, mine, shared):
        write(place / "MEMORY.md", f"# of {place}\n".encode())
        write(place / ".claude-mem/notes.md", b"notes")
    token = house.grant("acme", ["acme/*"], EVERY_VERB, sandboxes=(f"local:{folder}/srv/acme/*",))
    free = house.grant("free", ["free/*"], EVERY_VERB)

    async def ask(verb: str, token: str, memory: str = OWN, **more: Any) -> Any:
        reply = await house.call("POST", path(memory, verb), token, {"sandbox": f"local:{mine}", **more})
        return reply.json.get("code") or reply.json["outcome"]

    for named in (str(theirs), "../../victim/home", f"{mine}/../../victim/home"):
        assert await ask("exports", token, projects=[named]) == "root-outside"
    assert await ask("exports", token, projects=[str(shared)]) == "committed"
    assert await ask("restores", token, projects=[str(theirs)], discard=True) == "incomplete"
    assert await ask("restores", token, projects=[str(shared)], discard=True, attach=False) == "complete"
    assert (theirs / "MEMORY.md").read_text() == f"# of {theirs}\n"

    rmtree(mine / ".claude-mem")
    (mine / ".claude-mem").symlink_to(theirs / ".claude-mem")
    assert await ask("exports", token, "acme/linked") == "root-outside"
    assert await ask("exports", free, "free/linked") == "committed"  # this token is for all that the config allows
    (mine / ".claude-mem").unlink()
    await house.sidecar.close()


async def test_words_of_others_about_own_memories_name_no_other(house: House) -> None:
    """An administrator's mix-up stands in the tenant's log; the tenant is not told with what."""
    await house.keeper.forget_memory(FOREIGN[0])
    mixed = await house.call("POST", path(OWN, "exports"), body={"sandbox": f"local:{house.folder / 'globex-home'}"})
    assert mixed.json["reason"]["code"] == "other-memory" and FOREIGN[0] in mixed.json["reason"]["message"]
    await house.copy(FOREIGN[0], "acme/given")
    token = house.grant("acme", ["acme/*"], EVERY_VERB)
    snapshot = mixed.json["snapshot"]
    operation = next(
        one.id
        for one in house.sidecar.operations._known.values()
        if one.memory == OWN and one.receipt and one.receipt.snapshot == snapshot
    )
    for place in (path(OWN, "snapshots"), path(OWN, "snapshots", snapshot), f"/v1/operations/{operation}"):
        reply = await house.call("GET", place, token)
        assert reply.status == 200 and "other-memory" in reply.body.decode()
        assert FOREIGN[0] not in reply.body.decode()
    (row,) = (await house.call("GET", path("acme/given", "snapshots"), token)).json["snapshots"]
    assert row["origin"] == "fork of another memory"
    accepted = await house.call("POST", path(OWN, "acceptances"), token, {"snapshot": snapshot})
    assert accepted.status == 200 and FOREIGN[0] not in accepted.body.decode()


async def test_events_are_those_of_own_memories_and_their_numbers_tell_nothing(house: House) -> None:
    token = house.grant("acme", ["acme/*"], ROLE["read-only"])

    async def happen() -> None:
        for _ in range(7):
            house.sidecar.events.publish("export.committed", memory=FOREIGN[0], sandbox="e2b:xyzzy", snapshot="s")
        house.sidecar.events.publish("index.down", error={"code": "x", "message": "globex"})
        house.sidecar.events.publish(
            "restore.incomplete",
            memory=OWN,
            warnings=["Is it 'globex/vault'?"],
            reason={"code": "unsaved", "message": "globex/vault"},
            saved_first="s",
            saved_first_memory=FOREIGN[0],
            files=3,
        )
        house.sidecar.events.publish("export.committed", memory=OWN, snapshot="s")

    events = await house.listen(token, happen, until=2)
    assert [(event["type"], event["memory"]) for event in events] == [
        ("restore.incomplete", OWN),
        ("export.committed", OWN),
    ]
    assert events[0]["details"]["reason"]["code"] == "unsaved" and events[0]["details"]["files"] == 3
    text = json.dumps(events)
    assert [mark for mark in MARKS if mark in text] == []
    assert abs(events[1]["number"] - events[0]["number"]) > 1000
    # It goes on where it was.
    again = await house.listen(token, _nothing, last=events[0]["number"])
    assert [event["number"] for event in again] == [events[1]["number"]]
    whole = await house.listen(ADMIN_TOKEN, _nothing, last=0, until=10)
    assert len(whole) >= 10 and [event["number"] for event in whole] == sorted(event["number"] for event in whole)


async def _nothing() -> None:
    return None


async def test_a_stream_ends_with_its_token(house: House) -> None:
    token = house.grant("acme", ["acme/*"], ROLE["read-only"])

    async def revoke() -> None:
        house.revoke("acme")
        house.sidecar.events.publish("export.committed", memory=OWN, snapshot="s")

    assert await house.listen(token, revoke) == []


async def test_keys_and_operations_are_each_tokens_own(house: House) -> None:
    home = {"sandbox": f"local:{house.folder / 'acme-home'}"}
    first, second = (house.grant(name, ["acme/*"], ROLE["export-restore"]) for name in ("one", "two"))
    key = {"idempotency-key": "guess-me"}
    begun = await house.call("POST", path(OWN, "exports"), first, home, query="wait=false", headers=key)
    assert begun.status == 202
    place = f"/v1/operations/{begun.json['id']}"
    await house.sidecar.operations.drain(30)
    assert (await house.call("GET", place, first)).json["state"] == "done"
    # The same key with another body would be refused if it were the same key.
    other = await house.call("POST", path(OWN, "exports"), second, {**home, "label": "mine"}, headers=key)
    assert other.status == 200 and other.json["label"] == "mine"
    missing = await house.call("GET", "/v1/operations/000000000000000000000000", second)
    for hidden in (place, f"/v1/operations/{foreign_operation(house)}"):
        reply = await house.call("GET", hidden, second)
        assert (reply.status, reply.body) == (missing.status, missing.body) == (404, missing.body)
    again = await house.call("POST", path(OWN, "exports"), first, home, headers=key)
    assert again.json["snapshot"] == (await house.call("GET", place, first)).json["receipt"]["snapshot"]
    # A later token of the same name starts without the keys of the former one.
    house.revoke("one")
    later = house.grant("one", ["acme/*"], ROLE["export-restore"])
    assert (await house.call("POST", path(OWN, "exports"), later, {**home, "label": "new"}, headers=key)).status == 200


async def test_metrics_and_the_whole_stream_need_a_right_to_everything(house: House) -> None:
    for memories, verbs, status in (
        (["acme/*"], EVERY_VERB, 403),
        (["*"], ROLE["export-restore"], 403),
        (["*"], ROLE["read-only"], 200),
    ):
        token = house.grant(f"t{status}-{len(verbs)}", memories, verbs)
        assert (await house.call("GET", "/metrics", token)).status == status


async def test_a_search_finds_own_records_only(tmp_path: Path, searched: Searched) -> None:
    engine = engine_at(tmp_path / "store")
    index = index_of(engine, searched.open())
    house = House(tmp_path, engine=replace(engine, index=index))
    await settle(house)
    for name in ("acme/deep/er", "acme/a.b+c(d)"):
        await house.copy(OWN, name)
    _ = [done async for done in index.catch_up()]
    token = house.grant("acme", ["acme/*"], ROLE["read-only"])
    own = await house.call("GET", "/v1/search", token, query="q=acme")
    assert {hit["memory"] for hit in own.json["hits"]} == {OWN, "acme/deep/er", "acme/a.b+c(d)"}
    for query in ("q=xyzzy", "q=xyzzy&limit=1", "q=magic+words&offset=1", "q=xyzzy&kind=section"):
        found = await house.call("GET", "/v1/search", token, query=query)
        assert found.json["hits"] == [] and not found.json["more"] and found.json["unindexed"] == []
        unmarked(found, query)
    refused = [
        await house.call("GET", "/v1/search", token, query=f"q=xyzzy&memory={memory}")
        for memory in ("globex%2Fvault", "globex%2Fnothing")
    ]
    assert refused[0].body == refused[1].body and refused[0].status == 403
    await house.sidecar.close()


async def test_an_attachment_outlives_its_token_and_says_so(house: House) -> None:
    token = house.grant("acme", ["acme/*"], ROLE["append-only"])
    body = {"sandbox": f"local:{house.folder / 'acme-home'}", "checkpoint_every": 3600}
    attached = await house.call("PUT", path(OWN, "attachment"), token, body)
    assert attached.json["attachment"]["by"] == "acme" and not attached.json["attachment"]["note"]
    await house.watch.look()
    assert not (await house.call("GET", path(OWN, "attachment"))).json["attachment"]["note"]
    house.revoke("acme")
    published = await house.listen(ADMIN_TOKEN, house.watch.look)
    assert [(event["type"], event["memory"]) for event in published] == [("attachment.token-ended", OWN)]
    assert "revoked" in (await house.call("GET", path(OWN, "attachment"))).json["attachment"]["note"]
    assert (await house.call("GET", path(OWN, "attachment"), token)).status == 401
    # The service goes on by its own right.
    write(house.folder / "acme-home/MEMORY.md", b"# what acme knows, and more\n")
    receipt = await house.keeper.save((OWN, f"local:{house.folder / 'acme-home'}"), "checkpoint")
    assert receipt.outcome == "committed"
    house.grant("acme", ["acme/*"], ROLE["append-only"])
    await house.watch.look()
    assert not (await house.call("GET", path(OWN, "attachment"))).json["attachment"]["note"]
