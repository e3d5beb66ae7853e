"""A conversation is looked after from its restore to its export, whoever dies in between; and saved means saved."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parts.homes import PROJECT, claude_mem_home, empty_home, observe, run_cli, titles, write
from tests.parts.providers import Provider
from tests.parts.services import TOKEN, Service, path, serving, until

pytestmark = pytest.mark.usefixtures("forked_programs")

PROVIDERS = pytest.mark.parametrize("name", ["local", "e2b", pytest.param("daytona", marks=pytest.mark.slow)])
SOON: dict[str, Any] = {"checkpoint_every": 1}


def rows(service: Service, memory: str = "me") -> dict[str, dict[str, Any]]:
    """What is looked after of a memory, by sandbox."""
    answer = service.http.get("/v1/attachments").json()
    return {row["sandbox"]: row for row in answer["attachments"] if row["memory"] == memory}


def state(service: Service, sandbox: str, memory: str = "me") -> str:
    row = rows(service, memory).get(sandbox)
    return row["state"] if row else "not there"


def snapshots(service: Service, memory: str = "me") -> list[dict[str, Any]]:
    answer = service.http.get(path(memory, "snapshots"))
    return list(answer.json()["snapshots"]) if answer.status_code == 200 else []


def said(service: Service, event: str) -> list[dict[str, Any]]:
    return [line for line in service.lines() if line["event"] == event]


def metric(service: Service, name: str) -> float:
    lines = service.http.get("/metrics").text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)


def agent(tmp_path: Path, name: str = "home") -> Path:
    return claude_mem_home(empty_home(tmp_path / name) / "agent", rows=5)


# From restore to export


def test_a_restore_opens_a_conversation_and_the_export_closes_it(tmp_path: Path) -> None:
    home = agent(tmp_path)
    box = f"local:{home}"
    with serving(tmp_path / "store", tmp_path / "log") as service:
        assert service.restore("me", box, conversation="c1").json()["outcome"] == "empty"
        row = rows(service)[box]
        assert (row["state"], row["conversation"], row["saved"], row["problem"]) == ("open", "c1", "", "")
        assert service.export("me", box, conversation="c1").json()["outcome"] == "committed"
        closed = rows(service)[box]
        assert (closed["state"], closed["conversation"], closed["problem"]) == ("idle", "c1", "")
        assert closed["saved"] and closed["snapshot"] == snapshots(service)[0]["snapshot"]
        assert service.restore("me", box, conversation="c2").json()["outcome"] == "complete"
        again = rows(service)[box]
        assert (again["state"], again["conversation"]) == ("open", "c2")
        assert again["saved"] >= closed["saved"], "the head has all that was restored"


@pytest.mark.parametrize("body", [{"attach": False}, {"mode": "seed"}, {"snapshot": "the first"}])
def test_what_is_no_conversation_is_not_looked_after(tmp_path: Path, body: dict[str, Any]) -> None:
    home, other = agent(tmp_path), empty_home(tmp_path / "other")
    with serving(tmp_path / "store", tmp_path / "log") as service:
        first = service.export("me", f"local:{home}").json()["snapshot"]
        observe(home, 2, "later")
        second = service.export("me", f"local:{home}").json()["snapshot"]
        wanted = {**body, "snapshot": first} if "snapshot" in body else body
        assert service.restore("me", f"local:{other}", **wanted).json()["outcome"] == "complete"
        assert rows(service) == {}
        # And beside it the lawful case: the head by its id is no older snapshot than the latest.
        fresh = empty_home(tmp_path / "fresh")
        assert service.restore("me", f"local:{fresh}", snapshot=second).json()["outcome"] == "complete"
        assert state(service, f"local:{fresh}") == "open"


def test_an_incomplete_restore_opens_nothing(tmp_path: Path) -> None:
    home, other = empty_home(tmp_path / "home"), empty_home(tmp_path / "other")
    write(home / "memory/today.md", b"a day")
    write(other / "memory", b"a file in the way of the folder")
    with serving(tmp_path / "store", tmp_path / "log") as service:
        service.export("me", f"local:{home}")
        assert service.restore("me", f"local:{other}").json()["outcome"] == "incomplete"
        assert rows(service) == {}


@PROVIDERS
def test_an_open_conversation_is_exported_at_checkpoints_under_its_id_and_a_closed_one_is_not(
    name: str, tmp_path: Path, provider_of: Callable[[str], Provider]
) -> None:
    made = provider_of(name).create()
    claude_mem_home(made.home, rows=5)
    with serving(tmp_path / "store", tmp_path / "log") as service:
        service.restore("me", made.ref, conversation="c1", **SOON)
        until(lambda: len(snapshots(service)) == 1)
        observe(made.home, 2, "later")
        until(lambda: len(snapshots(service)) == 2)
        assert {(row["conversation"], row["label"]) for row in snapshots(service)} == {("c1", "checkpoint")}
        assert rows(service)[made.ref]["saved"] != ""
        assert service.export("me", made.ref, conversation="c1").json()["outcome"] in ("unchanged", "committed")
        stored = len(snapshots(service))
        observe(made.home, 2, "after its export")
        time.sleep(3)
        assert len(snapshots(service)) == stored
        assert service.stop() == 0


@PROVIDERS
def test_a_sandbox_that_goes_within_a_conversation_is_lost_and_one_that_goes_after_its_export_has_ended(
    name: str, tmp_path: Path, provider_of: Callable[[str], Provider]
) -> None:
    provider = provider_of(name)
    within, after = provider.create(), provider.create()
    with serving(tmp_path / "store", tmp_path / "log") as service:
        for memory, made in (("within", within), ("after", after)):
            claude_mem_home(made.home, rows=3)
            service.restore(memory, made.ref, conversation="c", **SOON)
        until(lambda: state(service, within.ref, "within") == "open" and rows(service, "within")[within.ref]["saved"])
        assert service.export("after", after.ref).json()["outcome"] in ("committed", "unchanged")
        for made in (within, after):
            _end(made)
        until(lambda: state(service, within.ref, "within") == "lost")
        until(lambda: state(service, after.ref, "after") == "ended")
        (lost,) = said(service, "sandbox lost")
        assert (lost["level"], lost["memory"], lost["conversation"]) == ("critical", "within", "c")
        assert 0 <= lost["unsaved_seconds"] < 60
        (ended,) = said(service, "sandbox ended")
        assert (ended["level"], ended["memory"]) == ("info", "after")
        assert "may be lost" in rows(service, "within")[within.ref]["problem"]
        assert rows(service, "after")[after.ref]["problem"] == ""
        assert metric(service, "memory_sidecar_sandboxes_lost_total") == 1
        assert metric(service, "memory_sidecar_attachments_at_risk") == 1
        assert service.stop() == 1, "something was lost"


def _end(made: Any) -> None:
    if made.handle is None:
        made.home.rename(made.home.with_name(f"{made.home.name}-gone"))
    else:
        made.handle.kill()


def test_an_export_that_finds_the_sandbox_gone_says_so_at_once(tmp_path: Path) -> None:
    home = agent(tmp_path)
    with serving(tmp_path / "store", tmp_path / "log") as service:
        service.restore("me", f"local:{home}")
        home.rename(home.with_name("gone"))
        assert service.export("me", f"local:{home}").status_code in (404, 410)
        assert state(service, f"local:{home}") == "lost"


def test_one_exported_behind_the_services_back_has_ended_all_the_same(tmp_path: Path) -> None:
    """By the command line, on the same store; the service never heard of it."""
    home = agent(tmp_path)
    with serving(tmp_path / "store", tmp_path / "log") as service:
        service.restore("me", f"local:{home}", checkpoint_every=3600)
        assert run_cli("export", "me", "--sandbox", f"local:{home}", store=tmp_path / "store").code == 0
        home.rename(home.with_name("gone"))
        service.export("me", f"local:{home}")
        assert state(service, f"local:{home}") == "ended"
        assert said(service, "sandbox lost") == []


def test_the_conductor_is_killed_and_the_service_stops_later(tmp_path: Path) -> None:
    home = agent(tmp_path)
    with serving(tmp_path / "store", tmp_path / "log") as service:
        program = f"""
            import time
            from sidecar.client import Client
            with Client("{service.url}", token="{TOKEN}").conversation(
                "me", sandbox="local:{home}", conversation="c9", checkpoint_every=3600
            ):
                print("talking", flush=True)
                time.sleep(600)
        """
        conductor = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
        )
        try:
            assert conductor.stdout is not None and conductor.stdout.readline() == "talking\n"
            observe(home, 3, "said before the end")
        finally:
            conductor.kill()
            conductor.wait()
        assert snapshots(service) == []
        assert service.stop() == 0
        service.start()
        (kept,) = [row for row in snapshots(service) if row["standing"] == "head"]
        assert (kept["conversation"], kept["label"]) == ("c9", "shutdown")
        until(lambda: state(service, f"local:{home}") == "open")
        service.http.delete(path("me", "attachment"))


def test_another_service_takes_a_conversation_over_and_its_export_may_go_to_either(tmp_path: Path) -> None:
    home, store = agent(tmp_path), tmp_path / "store"
    box = f"local:{home}"
    with serving(store, tmp_path / "one.log", lease=4) as one, serving(store, tmp_path / "two.log", lease=4) as two:
        one.restore("me", box, conversation="c1", checkpoint_every=3600)
        assert state(two, box) == "open"
        observe(home, 3, "unsaved")
        one.kill()
        until(lambda: said(two, "taken over"))
        until(lambda: len(snapshots(two)) == 1)
        assert snapshots(two)[0]["conversation"] == "c1"
        one.start()
        observe(home, 3, "and more")
        assert one.export("me", box, conversation="c1").json()["outcome"] == "committed"
        assert state(two, box) == "idle"
        until(lambda: metric(two, "memory_sidecar_attachments") == 0, 20)
        assert two.stop() == 0 and one.stop() == 0
        assert [row for row in two.lines() if row["event"] == "sandbox lost"] == []


def test_a_callers_export_beside_another_services_checkpoints_is_never_taken_for_diverged(tmp_path: Path) -> None:
    home, store = agent(tmp_path), tmp_path / "store"
    box = f"local:{home}"
    with serving(store, tmp_path / "one.log") as one, serving(store, tmp_path / "two.log") as two:
        for number in range(6):
            one.restore("me", box, conversation=f"c{number}", **SOON)
            observe(home, 2, f"round {number}")
            time.sleep(0.8)
            receipt = two.export("me", box, conversation=f"c{number}").json()
            assert receipt["outcome"] in ("committed", "unchanged"), receipt
            assert receipt["snapshot"] == receipt["head"]


def test_an_open_conversation_does_not_cost_a_callers_restore_and_export_any_request(
    tmp_path: Path, provider_of: Callable[[str], Provider]
) -> None:
    for name in ("e2b", "daytona"):
        provider = provider_of(name)
        first, second = provider.create(), provider.create()
        claude_mem_home(first.home, rows=5)
        with serving(tmp_path / f"{name}-store", tmp_path / f"{name}.log") as service:
            service.export("me", first.ref)
            asked = []
            for attach in (False, True):
                provider.server.clear()
                service.restore("me", second.ref, attach=attach)
                observe(second.home, 2, f"said {attach}")
                assert service.export("me", second.ref).json()["outcome"] == "committed"
                asked.append([call.step for call in provider.server.calls])
            info, *rest = asked[0]
            assert asked[1] == rest and info == "info", "only the first call has to find the sandbox"


def test_a_sandbox_that_hangs_when_the_service_stops_is_given_up_in_time_and_named(
    tmp_path: Path, provider_of: Callable[[str], Provider]
) -> None:
    provider = provider_of("e2b")
    made, home = provider.create(), agent(tmp_path)
    claude_mem_home(made.home, rows=3)
    with serving(tmp_path / "store", tmp_path / "log", grace=5) as service:
        service.restore("hangs", made.ref, conversation="c1", checkpoint_every=3600)
        service.restore("fine", f"local:{home}", conversation="c2", checkpoint_every=3600)
        provider.server.latency = 60
        try:
            assert service.stop() == 1
        finally:
            provider.server.latency = 0
        (unsaved,) = said(service, "not saved")
        assert (unsaved["memory"], unsaved["sandbox"], unsaved["conversation"]) == ("hangs", made.ref, "c1")
        service.start()
        assert [row["label"] for row in snapshots(service, "fine")] == ["shutdown"]
        until(lambda: snapshots(service, "hangs"))  # the next one takes it up again
        assert service.stop() == 0


def test_a_service_that_takes_longer_to_stop_than_its_lease_is_still_the_owner(
    tmp_path: Path, provider_of: Callable[[str], Provider]
) -> None:
    provider = provider_of("e2b")
    made = provider.create()
    claude_mem_home(made.home, rows=3)
    with serving(tmp_path / "store", tmp_path / "log", lease=2, grace=50) as service:
        service.restore("me", made.ref, checkpoint_every=3600)
        provider.server.latency = 2.5
        try:
            assert service.stop() == 0
        finally:
            provider.server.latency = 0
        service.start()
        assert [row["label"] for row in snapshots(service) if row["standing"] == "head"] == ["shutdown"]


# Several sandboxes of one memory


def test_two_conversations_on_one_memory_are_looked_after_side_by_side(tmp_path: Path) -> None:
    first, second = agent(tmp_path), empty_home(tmp_path / "second")
    boxes = [f"local:{first}", f"local:{second}"]
    with serving(tmp_path / "store", tmp_path / "log") as service:
        service.export("me", boxes[0])
        for number, box in enumerate(boxes):
            service.restore("me", box, conversation=f"c{number}", checkpoint_every=3600)
        found = rows(service)
        assert {box: (row["state"], row["conversation"]) for box, row in found.items()} == {
            boxes[0]: ("open", "c0"),
            boxes[1]: ("open", "c1"),
        }
        refused = service.http.get(path("me", "attachment"))
        assert (refused.status_code, refused.json()["code"]) == (409, "several-attachments")
        assert all(box in refused.json()["detail"] for box in boxes)
        named = service.http.get(path("me", "attachment"), params={"sandbox": boxes[1]})
        assert named.json()["attachment"]["conversation"] == "c1"
        observe(second, 2, "in the second")
        observe(first, 2, "in the first")
        assert service.http.delete(path("me", "attachment")).status_code == 409
        gone = service.http.delete(path("me", "attachment"), params={"sandbox": boxes[1], "export": "true"})
        assert gone.json()["exported"]["outcome"] == "committed"
        assert list(rows(service)) == [boxes[0]]
        assert service.http.get(path("me", "attachment")).json()["attachment"]["sandbox"] == boxes[0]
        assert service.stop() == 1, "the first has diverged from what the second saved"
        service.start()
        assert sorted(row["standing"] for row in snapshots(service)) == ["diverged", "earlier head", "head"]


def test_two_that_were_attached_by_name_are_both_saved(tmp_path: Path) -> None:
    homes = [agent(tmp_path, f"home{number}") for number in range(2)]
    observe(homes[1], 2, "only here")
    with serving(tmp_path / "store", tmp_path / "log") as service:
        for home in homes:
            answer = service.http.put(path("me", "attachment"), json={"sandbox": f"local:{home}", **SOON})
            assert answer.status_code == 200
        until(lambda: len(snapshots(service)) == 2)
        until(lambda: all(row["saved"] or row["problem"] for row in rows(service).values()))
        problems = [row["problem"].partition(":")[0] for row in rows(service).values()]
        assert sorted(problems) == ["", "diverged"], "one of two that began apart cannot be the head"


def test_a_service_that_takes_over_several_of_one_memory_lets_none_diverge(tmp_path: Path) -> None:
    """Each take-over writes the head anew against the former owner; that must not be in the way of anybody else."""
    store = tmp_path / "store"
    with serving(store, tmp_path / "one.log", lease=3) as one:
        homes = [agent(tmp_path, f"home{number}") for number in range(4)]
        one.export("me", f"local:{homes[0]}")
        for number, home in enumerate(homes):
            one.restore("me", f"local:{home}", conversation=f"c{number}", checkpoint_every=3600)
        observe(homes[2], 3, "the only one that has something new")
        one.kill()
        one.start()
        until(lambda: len(said(one, "taken over")) == 4)
        until(lambda: len(snapshots(one)) == 2)
        time.sleep(2)
        standings = [row["standing"] for row in snapshots(one)]
        assert standings == ["head", "earlier head"] and snapshots(one)[0]["conversation"] == "c2"


# Saved means that the head has it

LIMIT = "[limits]\nbytes = 2000\n"


def _limit(home: Path) -> None:
    write(home / "MEMORY.md", b"x" * 5000)


def _guard(home: Path) -> None:
    (home / "MEMORY.md").unlink()


REFUSED = {
    "limit": (LIMIT, _limit, "rejected (limit-bytes)", "[limits]", False),
    "guard": ("", _guard, "rejected (empty)", "accept me", True),
}


@pytest.mark.parametrize("how", ["conversation", "attachment"])
@pytest.mark.parametrize("why", REFUSED)
def test_a_refused_export_is_a_problem_everywhere(why: str, how: str, tmp_path: Path) -> None:
    policy, spoil, kind, advice, kept = REFUSED[why]
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# remembered\n" * 100)
    box = f"local:{home}"
    with serving(tmp_path / "store", tmp_path / "log", more=policy) as service:
        assert service.export("me", box).json()["outcome"] == "committed"
        if how == "conversation":
            service.restore("me", box, conversation="c", **SOON)
        else:
            service.http.put(path("me", "attachment"), json={"sandbox": box, **SOON})
        until(lambda: rows(service)[box]["saved"])
        spoil(home)
        until(lambda: rows(service)[box]["problem"])
        before = rows(service)[box]
        assert before["problem"].startswith(kind) and advice in before["hint"]
        assert before["state"] == "open"
        assert metric(service, "memory_sidecar_attachments_at_risk") == 1
        rejected = 'memory_sidecar_operations_total{kind="export",outcome="rejected"}'
        until(lambda: metric(service, rejected) >= 3)
        assert rows(service)[box]["saved"] == before["saved"], "it was not saved again"
        told = [line for line in said(service, "export rejected") if line["level"] == "warning"]
        assert len(told) == 1, "told once, however often it is tried"
        assert told[0]["reason"]["code"] in kind and told[0]["hint"]
        assert len(snapshots(service)) == (2 if kept else 1)
        assert service.stop() == 1
        (unsaved,) = said(service, "not saved")
        assert unsaved["problem"].startswith(kind)


def test_the_end_of_a_problem_is_told_too(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# remembered\n" * 100)
    box = f"local:{home}"
    with serving(tmp_path / "store", tmp_path / "log", more=LIMIT) as service:
        service.restore("me", box, **SOON)
        until(lambda: rows(service)[box]["saved"])
        _limit(home)
        until(lambda: rows(service)[box]["problem"])
        write(home / "MEMORY.md", b"# remembered\n" * 101)
        until(lambda: not rows(service)[box]["problem"])
        (again,) = said(service, "saved again")
        assert (again["level"], again["problem"]) == ("warning", "rejected (limit-bytes)")
        assert metric(service, "memory_sidecar_attachments_at_risk") == 0
        assert service.stop() == 0


def test_a_diverged_export_is_a_problem_though_the_callers_own(tmp_path: Path) -> None:
    first, second = agent(tmp_path), empty_home(tmp_path / "second")
    with serving(tmp_path / "store", tmp_path / "log") as service:
        service.export("me", f"local:{first}")
        service.restore("me", f"local:{second}")
        observe(first, 2, "somebody else went on")
        moved = service.export("me", f"local:{first}").json()["snapshot"]
        observe(second, 2, "and so did we")
        receipt = service.export("me", f"local:{second}").json()
        assert receipt["outcome"] == "diverged"
        row = rows(service)[f"local:{second}"]
        assert (row["state"], row["problem"].partition(":")[0]) == ("idle", "diverged")
        assert f"accept me {receipt['snapshot']}" in row["hint"] and moved in row["hint"]
        assert metric(service, "memory_sidecar_attachments_at_risk") == 1
        (told,) = said(service, "export diverged")
        assert (told["level"], told["reason"]["code"]) == ("warning", "diverged")
        assert service.stop() == 1


def test_nothing_new_behind_the_head_is_not_called_saved(tmp_path: Path) -> None:
    first, second = agent(tmp_path), empty_home(tmp_path / "second")
    box = f"local:{second}"
    with serving(tmp_path / "store", tmp_path / "log") as service:
        service.export("me", f"local:{first}")
        service.restore("me", box, **SOON)
        until(lambda: said(service, "export unchanged"))
        observe(first, 2, "somebody else went on")
        service.export("me", f"local:{first}")
        until(lambda: rows(service)[box]["problem"])
        assert rows(service)[box]["problem"].startswith("behind")
        assert service.restore("me", box, **SOON).json()["outcome"] == "complete"
        assert rows(service)[box]["problem"] == ""
        assert titles(second) == titles(first)


def test_a_first_conversation_in_which_nothing_was_written_is_no_problem(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    with serving(tmp_path / "store", tmp_path / "log") as service:
        assert service.restore("me", f"local:{home}", **SOON).json()["outcome"] == "empty"
        until(lambda: said(service, "export rejected"))
        assert rows(service)[f"local:{home}"]["problem"] == ""
        assert service.stop() == 0


def test_a_store_that_cannot_take_the_note_costs_nobody_a_restore(tmp_path: Path) -> None:
    home, store = agent(tmp_path), tmp_path / "store"
    with serving(store, tmp_path / "log") as service:
        service.export("me", f"local:{home}")
        write(store / "conversations", b"a file where a folder has to be")
        receipt = service.restore("me", f"local:{home}").json()
        assert receipt["outcome"] == "complete"
        assert any("not looked after" in warning for warning in receipt["warnings"])
        assert service.export("me", f"local:{home}").json()["outcome"] == "unchanged"


# Old and new side by side


def test_what_an_earlier_version_attached_is_taken_up(tmp_path: Path, earlier: type[Service]) -> None:
    home, store = agent(tmp_path), tmp_path / "store"
    box = f"local:{home}"
    with serving(store, tmp_path / "old.log", kind=earlier, lease=3) as old:
        assert (
            old.http.put(path("me", "attachment"), json={"sandbox": box, "checkpoint_every": 3600}).status_code == 200
        )
        observe(home, 3, "unsaved")
        old.kill()
        with serving(store, tmp_path / "new.log", lease=3) as new:
            until(lambda: said(new, "taken over"))
            until(lambda: len(snapshots(new)) == 1)
            until(lambda: rows(new)[box]["saved"])
            row = rows(new)[box]
            assert (row["state"], row["lasting"], row["problem"]) == ("open", True, "")


def test_an_earlier_service_takes_over_what_was_attached_by_name_and_leaves_the_rest_alone(
    tmp_path: Path, earlier: type[Service]
) -> None:
    store = tmp_path / "store"
    homes = [agent(tmp_path, f"home{number}") for number in range(3)]
    boxes = [f"local:{home}" for home in homes]
    with (
        serving(store, tmp_path / "old.log", kind=earlier, lease=3) as old,
        serving(store, tmp_path / "new.log", lease=3) as new,
    ):
        new.restore("me", boxes[0], conversation="c0", checkpoint_every=3600)
        for box in boxes[1:]:
            new.http.put(path("me", "attachment"), json={"sandbox": box, "checkpoint_every": 3600})
        time.sleep(4)
        assert [line for line in old.lines() if line["level"] in ("error", "critical")] == []
        assert old.http.get(path("me", "attachment")).json()["attachment"]["sandbox"] == boxes[1]
        observe(homes[1], 3, "unsaved")
        new.kill()
        until(lambda: said(old, "taken over"))
        until(lambda: [row["sandbox"] for row in snapshots(old)] == [boxes[1]])
        new.start()
        until(lambda: len(said(new, "taken over")) == 2)
        found = rows(new)
        assert set(found) == set(boxes)
        assert found[boxes[0]]["conversation"] == "c0"
        assert found[boxes[1]]["owner"] == said(old, "taken over")[0]["instance"], "it lives, so it keeps it"
        assert [line for line in old.lines() if line["level"] in ("error", "critical")] == []
        old.kill()
        until(lambda: len(said(new, "taken over")) == 3)
        assert rows(new)[boxes[1]]["state"] == "open"


def test_what_an_earlier_service_attaches_puts_nothing_of_ours_out_of_its_place(
    tmp_path: Path, earlier: type[Service]
) -> None:
    store = tmp_path / "store"
    boxes = [f"local:{agent(tmp_path, f'home{number}')}" for number in range(2)]
    every = {"checkpoint_every": 3600}
    with (
        serving(store, tmp_path / "old.log", kind=earlier, lease=3) as old,
        serving(store, tmp_path / "new.log", lease=3) as new,
    ):
        new.http.put(path("me", "attachment"), json={"sandbox": boxes[0], **every})
        old.http.put(path("me", "attachment"), json={"sandbox": boxes[1], **every})
        until(lambda: set(rows(new)) == set(boxes))
        owners = {box: row["owner"] for box, row in rows(new).items()}
        assert owners[boxes[0]] != owners[boxes[1]]
        # A conversation in the sandbox that the earlier one looks after: one of the two looks after it, not both.
        new.restore("me", boxes[1], conversation="c1", checkpoint_every=3600)
        until(lambda: said(old, "another service has taken over"))
        assert rows(new)[boxes[1]]["owner"] == owners[boxes[0]]
        assert old.http.delete(path("me", "attachment")).status_code == 200
        until(lambda: list(rows(new)) == [boxes[0]])


def test_an_export_through_an_earlier_service_closes_the_conversation_when_the_sandbox_goes(
    tmp_path: Path, earlier: type[Service]
) -> None:
    home, store = agent(tmp_path), tmp_path / "store"
    with (
        serving(store, tmp_path / "old.log", kind=earlier) as old,
        serving(store, tmp_path / "new.log") as new,
    ):
        new.restore("me", f"local:{home}", checkpoint_every=2)
        observe(home, 3, "said")
        assert old.export("me", f"local:{home}").json()["outcome"] == "committed"
        home.rename(home.with_name("gone"))
        until(lambda: state(new, f"local:{home}") == "ended")
        assert said(new, "sandbox lost") == []


def test_a_conversation_may_be_repeated_by_its_keys_across_a_crash(tmp_path: Path) -> None:
    home = agent(tmp_path)
    with serving(tmp_path / "store", tmp_path / "log", lease=3) as service:
        service.export("me", f"local:{home}")
        restored = service.restore("me", f"local:{home}", key="r", conversation="c").json()
        observe(home, 2, "said before the repetition")
        service.kill()
        service.start()
        assert service.restore("me", f"local:{home}", key="r", conversation="c").json() == restored
        assert state(service, f"local:{home}") == "open"
        observe(home, 2, "and then")
        first = service.export("me", f"local:{home}", key="e").json()
        assert first["snapshot"] == first["head"]
        assert state(service, f"local:{home}") == "idle"
        assert service.export("me", f"local:{home}", key="e").json() == first


@pytest.mark.parametrize("by", ["service", "command"])
def test_a_memory_that_is_deleted_is_not_begun_again_by_what_looks_after_it(tmp_path: Path, by: str) -> None:
    homes = [agent(tmp_path, f"home{number}") for number in range(3)]
    with serving(tmp_path / "store", tmp_path / "log") as service:
        service.restore("me", f"local:{homes[0]}", **SOON)
        service.http.put(path("me", "attachment"), json={"sandbox": f"local:{homes[1]}", **SOON})
        service.restore("other", f"local:{homes[2]}", checkpoint_every=3600)
        until(lambda: snapshots(service))

        def delete() -> bool:
            if by == "service":
                return service.http.delete(path("me")).status_code == 200
            return run_cli("delete", "me", "--yes", store=tmp_path / "store").code == 0

        assert delete()
        until(lambda: metric(service, "memory_sidecar_operations_running") == 0)
        if snapshots(service):  # of a checkpoint that had begun before
            assert delete()
        assert rows(service) == {}
        observe(homes[0], 2, "and more")
        time.sleep(3)
        assert snapshots(service) == [] and service.stop() == 0
        assert not list((tmp_path / "store/memories").glob("me/*"))
        assert len(list((tmp_path / "store/conversations").glob("[!.]*"))) == 1, "another memory's stays"


def test_a_sandbox_that_nobody_uses_any_more_is_not_kept_from_stopping(
    tmp_path: Path, provider_of: Callable[[str], Provider]
) -> None:
    """At Daytona each request puts its end off: an export now and then would keep it running for ever."""
    made = provider_of("daytona").create(seconds=15)
    claude_mem_home(made.home, rows=3)
    with serving(tmp_path / "store", tmp_path / "log") as service:
        service.restore("me", made.ref, **SOON)
        emulated: Any = made.emulated
        until(lambda: emulated.touch() or snapshots(service))
        for number in range(3):  # as long as it is used, it is saved
            observe(made.home, 1, f"said {number}")
            until(lambda number=number: emulated.touch() or len(snapshots(service)) == number + 2)  # type: ignore[misc]
        until(lambda: not made.emulated.running)
        time.sleep(2)
        row = rows(service)[made.ref]
        assert (row["state"], row["problem"]) == ("open", ""), "it sleeps, and keeps what it has"
        assert service.stop() == 0
