"""Whoever waits outside a sandbox learns when its memory is in place, whoever restored it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.client import Client
from tests.parts.homes import PROJECT, empty_home, run_cli, write
from tests.parts.providers import Provider
from tests.parts.services import TOKEN, Service, path, serving, until
from tests.parts.watching import REMOTE, SIGN, Watched


@pytest.fixture
def watched(tmp_path: Path, provider_of: Callable[[str], Provider]) -> Callable[[str], Watched]:
    return lambda name: Watched(tmp_path, provider_of(name))


def ask(service: Service, ref: str, wait: float = 0) -> dict[str, Any]:
    answer = service.http.get(f"/v1/sandboxes/{ref.replace('/', '%2F')}", params={"wait": wait})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_waiting_ends_when_the_memory_is_in_place(watched: Callable[[str], Watched]) -> None:
    here = watched("e2b")
    here.remember()
    sandbox = here.create(memory="conductor")
    with here.served("idle", memories=["other"]) as service:
        env = {"MEMORY_SIDECAR_URL": service.url, "MEMORY_SIDECAR_TOKEN": TOKEN}
        late = run_cli("wait", f"--sandbox={here.ref(sandbox)}", "--timeout=0.5", store=here.store, env=env)
        assert late.code == 1 and late.document["in_place"] is False and "Traceback" not in late.stderr
        assert ask(service, here.ref(sandbox), 1)["state"] == ""
    with here.served() as service:
        env = {"MEMORY_SIDECAR_URL": service.url, "MEMORY_SIDECAR_TOKEN": TOKEN}
        done = run_cli("wait", f"--sandbox={here.ref(sandbox)}", store=here.store, env=env)
        assert done.code == 0 and done.document["memory"] == "conductor" and done.document["snapshot"]
        assert (sandbox.home / SIGN).exists()
        second = here.create(memory="conductor")
        with Client(service.url, token=TOKEN) as client:
            reader = client.sandbox(here.ref(second), wait=60)
        assert (reader.in_place, reader.state, reader.memory) == (True, "reader", "conductor")
        assert here.ref(sandbox) in reader.problem
        refused = here.create(memory="globex")
        assert not ask(service, here.ref(refused))["in_place"]
        sandbox.kill()
        until(lambda: ask(service, here.ref(sandbox))["state"] == "lost")
        assert not ask(service, here.ref(sandbox), 0.1)["in_place"]
        asleep = here.create()
        asleep.pause()
        told = ask(service, here.ref(asleep))
        assert (told["in_place"], told["state"], asleep.state) == (False, "asleep", "paused")
        for wait in (0, 1):  # also the last of several looks says why
            gone = ask(service, "e2b:nowhere", wait)
            assert not gone["in_place"] and gone["problem"].startswith("sandbox-gone")


def test_what_was_restored_by_a_command_or_without_looking_after_it_is_in_place_too(tmp_path: Path) -> None:
    home, other, third = (empty_home(tmp_path / name) for name in ("home", "other", "third"))
    write(home / "MEMORY.md", b"learned")
    assert run_cli("export", "me", f"--sandbox=local:{home}", store=tmp_path / "store").code == 0
    assert run_cli("restore", "me", f"--sandbox=local:{other}", store=tmp_path / "store").code == 0
    with serving(tmp_path / "store", tmp_path / "log") as service:
        found = ask(service, f"local:{other}")
        assert (found["in_place"], found["memory"], found["state"]) == (True, "me", "restored")
        assert not ask(service, f"local:{third}")["in_place"]
        answers: list[dict[str, Any]] = []
        waiting = threading.Thread(target=lambda: answers.append(ask(service, f"local:{third}", 60)))
        waiting.start()
        time.sleep(0.3)
        assert service.restore("me", f"local:{third}", read_only=True).json()["outcome"] == "complete"
        waiting.join(60)
        assert answers[0]["in_place"] and answers[0]["state"] == "reader"
        assert service.restore("me", f"local:{other}").json()["outcome"] == "complete"
        assert ask(service, f"local:{other}")["state"] == "open"
        assert service.http.get("/v1/sandboxes/nonsense").status_code == 400
        assert service.http.get("/v1/sandboxes/e2b:..%2Fx").status_code == 400
        assert service.http.get("/v1/sandboxes/e2b:i1", params={"wait": -1}).status_code == 422
    assert run_cli("wait", "--sandbox=e2b:i1", "--timeout=-1", store=tmp_path / "store").code == 2


# The five lines of the docs


def read_lines(name: str) -> str:
    """The conductor of five lines, as docs/conductor.md has it."""
    text = (PROJECT / "docs/conductor.md").read_text().partition("## Watch")[2]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return next(block for block in blocks if ("Daytona" in block) == (name == "daytona"))


WORK = "echo lesson >> MEMORY.md; until [ -e go ]; do sleep 0.1; done"


@pytest.mark.parametrize("name", REMOTE)
def test_the_five_lines_of_the_docs_work_as_they_are(watched: Callable[[str], Watched], name: str) -> None:
    here = watched(name)
    lines = read_lines(name).replace("my-agent", WORK)
    assert WORK in lines and len(lines.splitlines()) <= 5
    if name == "e2b":
        from e2b import Sandbox

        given: dict[str, Any] = {"Sandbox": Sandbox}
    else:
        from daytona import CreateSandboxFromSnapshotParams, Daytona, DaytonaConfig

        params = CreateSandboxFromSnapshotParams
        daytona = lambda: Daytona(DaytonaConfig(use_deprecated_polling=True))  # noqa: E731
        given = {"Daytona": daytona, "CreateSandboxFromSnapshotParams": params}
    with here.served(checkpoint_every=1) as service:
        place = path("conductor", "snapshots", "latest", "files", "project%2FMEMORY.md")
        for number in range(1, 4):
            conductor = threading.Thread(target=exec, args=(lines, dict(given)))
            conductor.start()
            until(lambda: service.http.get(place).text == "lesson\n" * number)  # noqa: B023
            for sandbox in here.provider.server.sandboxes():
                if sandbox.state != sandbox.GONE:
                    write(sandbox.home / "go", b"")
            conductor.join(60)
            assert all(one.state == one.GONE for one in here.provider.server.sandboxes())
