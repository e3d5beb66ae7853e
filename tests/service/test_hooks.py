"""What providers send to hooks: forged, replayed, reordered and late ones are refused or change nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from emulators.webhooks import Webhook, sign_as_e2b
from sidecar.service.access.refusals import FREE
from sidecar.service.watch.notifications import MOST_BYTES, BadHook, NotFromProvider, Notifications, sign_e2b
from tests.parts.homes import write
from tests.parts.providers import Provider
from tests.parts.services import Service, until
from tests.parts.watching import SECRET, SECRET_ENV, SIGN, Watched

ONLY_HOOKS: dict[str, Any] = {"list_every": 0, "secret_env": SECRET_ENV}


@pytest.fixture
def watched(tmp_path: Path, provider_of: Callable[[str], Provider]) -> Callable[[str], Watched]:
    return lambda name: Watched(tmp_path, provider_of(name))


def e2b_event(**more: Any) -> bytes:
    event = {"id": "1", "type": "sandbox.lifecycle.created", "sandboxId": "i1", **more}
    return json.dumps(event).encode()


def signed(body: bytes, secret: str = SECRET) -> dict[str, str]:
    return dict(sign_as_e2b(secret)(body))


# The check itself


def test_the_signature_is_the_one_that_e2b_documents() -> None:
    body = b'{"id":"1"}'
    digest = hashlib.sha256(b"a secret of sixteen" + body).digest()
    given = sign_e2b("a secret of sixteen", body)
    assert base64.urlsafe_b64decode(given + "=") == digest and "=" not in given
    hooks = Notifications("e2b", ["a secret of sixteen"])
    for spelled in (base64.b64encode(digest), base64.urlsafe_b64encode(digest), base64.b64encode(digest).rstrip(b"=")):
        assert hooks.read(body, {"e2b-signature": spelled.decode()}) is None  # it is about no sandbox


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"e2b-signature": ""},
        {"e2b-signature": "A" * 43},
        {"e2b-signature": "\u00e9"},
        {"authorization": f"Bearer {SECRET}"},
        signed(e2b_event(), "another secret of some length"),
        signed(e2b_event(id="2")),
    ],
)
def test_what_is_not_signed_with_the_secret_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(NotFromProvider):
        Notifications("e2b", [SECRET]).read(e2b_event(), headers)
    with pytest.raises(NotFromProvider):
        Notifications("e2b", []).read(e2b_event(), signed(e2b_event(), ""))


@pytest.mark.parametrize(
    "given", ["", "Bearer", f"Basic {SECRET}", "Bearer other", f"Bearer {SECRET}x", f"Bearer {SECRET[:-1]}"]
)
def test_daytona_has_to_send_the_secret(given: str) -> None:
    hooks = Notifications("daytona", [SECRET, "another secret of some length"])
    body = json.dumps({"event": "sandbox.created", "id": "b1"}).encode()
    with pytest.raises(NotFromProvider):
        hooks.read(body, {"authorization": given})
    assert hooks.read(body, {"authorization": "bearer another secret of some length"}) == "daytona:b1"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"1",
        b"nonsense",
        b"\xff\xfe",
        b"[" * 5000,
        e2b_event() + b"\x80" + b"\0" * 40 + e2b_event(id="2"),  # as a signature of this kind can be prolonged
        e2b_event(sandboxId=""),
        e2b_event(sandboxId=7),
        e2b_event(sandboxId="../i1"),
        e2b_event(sandboxId="i1/timeout"),
        e2b_event(sandboxId="i1\n"),
        e2b_event(sandboxId="i" * 200),
    ],
)
def test_what_names_no_sandbox_is_refused_although_it_is_signed(body: bytes) -> None:
    with pytest.raises(BadHook):
        Notifications("e2b", [SECRET]).read(body, signed(body))


def test_an_event_counts_once_and_others_are_ignored() -> None:
    hooks = Notifications("e2b", [SECRET])
    for body, found in (
        (e2b_event(), "e2b:i1"),
        (e2b_event(), None),
        (e2b_event(more="the same id"), None),
        (e2b_event(id="2"), "e2b:i1"),
        (e2b_event(id=3), "e2b:i1"),
        (e2b_event(id=3), None),
        (e2b_event(id="4", type="template.built"), None),
        (e2b_event(id="5", type=None), None),
    ):
        assert hooks.read(body, signed(body)) == found


# Over HTTP


def post(service: Service, body: bytes, headers: dict[str, str], provider: str = "e2b") -> httpx.Response:
    given = {"content-type": "application/json", **headers}
    return httpx.post(f"{service.url}/v1/hooks/{provider}", content=body, headers=given, timeout=60, trust_env=False)


def test_hooks_need_no_token_but_their_secret_and_refusals_are_counted_and_slowed(
    watched: Callable[[str], Watched],
) -> None:
    here = watched("e2b")
    with here.served(**ONLY_HOOKS) as service:
        body = e2b_event()
        assert post(service, body, signed(body)).json() == {"accepted": True}
        assert post(service, body, signed(body)).json() == {"accepted": False}
        token = {"authorization": str(service.http.headers["authorization"])}
        forged = [post(service, body, {**token, "e2b-signature": "A" * 43}) for _ in range(FREE)]
        assert {one.status_code for one in forged} == {401} and forged[0].json()["code"] == "hook-refused"
        assert post(service, b"x" * (MOST_BYTES + 1), signed(body)).status_code == 413
        assert post(service, b"nonsense", signed(b"nonsense")).status_code == 400
        assert post(service, body, signed(body), "daytona").status_code == 401, "it has no secret"
        assert post(service, body, signed(body), "modal").status_code == 401, "no such hook"
        assert service.http.post("/v1/hooks/modal", json={}).status_code == 422
        metrics = service.http.get("/metrics").text
        assert 'memory_sidecar_hooks_total{outcome="accepted"} 1.0' in metrics
        assert f'memory_sidecar_hooks_total{{outcome="refused"}} {FREE + 1}.0' in metrics
        refused = f'memory_sidecar_refused_calls_total{{status="401"}} {FREE + 2}.0'
        assert refused in metrics, "as calls without a token are: the more of them, the longer each takes"
        assert SECRET not in service.log.read_text()


def test_without_a_watch_every_webhook_is_refused(watched: Callable[[str], Watched]) -> None:
    here = watched("e2b")
    with here.served() as service:  # it lists; there is no secret
        body = e2b_event()
        assert post(service, body, signed(body)).status_code == 401
        assert post(service, body, signed(body, "")).status_code == 401
        assert post(service, body, {"authorization": "Bearer x"}, "daytona").status_code == 401


@pytest.mark.parametrize("name", ["e2b", pytest.param("daytona", marks=pytest.mark.slow)])
def test_replayed_reordered_and_late_webhooks_change_nothing(watched: Callable[[str], Watched], name: str) -> None:
    here = watched(name)
    here.remember()
    with here.served(**ONLY_HOOKS, checkpoint_every=3600) as service:
        hook = here.hook(service)
        hook.held = True
        early = here.create(memory="conductor")
        early.kill()
        sandbox = here.create(memory="conductor")
        sandbox.pause()
        sandbox.resume()
        for webhook in reversed(hook.waiting):  # the last comes first
            assert hook.post(webhook) == 202
        here.await_attached(service, sandbox)
        write(sandbox.home / "MEMORY.md", b"what the agent wrote since")
        service.kill()
        service.start()  # it does not know what came before
        hook.url = f"{service.url}/v1/hooks/{name}"
        for webhook in hook.waiting * 2:
            assert hook.post(webhook) == 202
        forged = json.loads(hook.waiting[0].body) | {"id": "9", "sandboxId": "nobody"}
        body = json.dumps(forged).encode()
        assert hook.post(Webhook(body, {"Content-Type": "application/json", "e2b-signature": "x"})) == 401
        here.await_attached(service, sandbox)
        assert (sandbox.home / "MEMORY.md").read_text() == "what the agent wrote since"
        assert early.state == early.GONE and not (early.home / SIGN).exists()
        sandbox.kill()
        hook.post(hook.waiting[-1])
        until(lambda: here.find(service, sandbox)["state"] == "lost")
        said = [line for line in service.lines() if line["event"] == "sandbox lost"]
        assert len(said) == 1 and said[0]["unsaved_seconds"] >= 0
    assert here.restores("log") == [here.ref(sandbox)]


def test_many_webhooks_at_once_restore_once(watched: Callable[[str], Watched]) -> None:
    here = watched("e2b")
    here.remember()
    with here.served("a", **ONLY_HOOKS) as one, here.served("b", **ONLY_HOOKS) as two:
        sandbox = here.create(memory="conductor")

        def flood(service: Service) -> None:
            for number in range(15):
                body = e2b_event(id=f"{number}", sandboxId=sandbox.id)
                assert post(service, body, signed(body)).status_code == 202

        senders = [threading.Thread(target=flood, args=(service,)) for service in (one, two)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        here.await_attached(one, sandbox)
    assert here.restores("a", "b") == [here.ref(sandbox)]
