"""``attach``, ``detach`` and ``attachments``: through a living service on the store that is meant, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.cli.arguments import build_parser
from tests.parts.homes import Ran, empty_home, run_cli, write
from tests.parts.s3_servers import free_port
from tests.parts.services import TOKEN, Service, serving, until

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# remembered\n" * 10)
    return home


def at(service: Service, store: Path, *words: str) -> Ran:
    return run_cli(*words, store=store, env={"MEMORY_SIDECAR_URL": service.url, "MEMORY_SIDECAR_TOKEN": TOKEN})


def test_a_sandbox_is_attached_listed_and_detached(tmp_path: Path, home: Path) -> None:
    store, box = tmp_path / "store", f"local:{home}"
    with serving(store, tmp_path / "log") as service:
        attached = at(
            service, store, "attach", "me", "--sandbox", box, "--checkpoint-every", "1", "--conversation", "c"
        )
        assert (attached.code, attached.document["attachment"]["state"]) == (0, "open")
        until(lambda: at(service, store, "attachments").document["attachments"][0]["saved"])
        (row,) = at(service, store, "attachments").document["attachments"]
        told = (row["memory"], row["sandbox"], row["conversation"], row["state"], row["problem"])
        assert told == ("me", box, "c", "open", "")
        write(home / "MEMORY.md", b"# remembered, and more\n" * 10)
        detached = at(service, store, "detach", "me", "--export")
        assert (detached.code, detached.document["exported"]["label"]) == (0, "detached")
        assert detached.document["exported"]["snapshot"] == detached.document["exported"]["head"]
        assert at(service, store, "attachments").document["attachments"] == []
        assert (at(service, store, "detach", "me").code, at(service, store, "detach", "me").error) == (
            1,
            "not-attached",
        )


def test_of_several_one_is_named(tmp_path: Path, home: Path) -> None:
    store, other = tmp_path / "store", empty_home(tmp_path / "other")
    with serving(store, tmp_path / "log") as service:
        for folder in (other, home):
            assert at(service, store, "attach", "me", "--sandbox", f"local:{folder}").code == 0
        assert at(service, store, "attach", "another", "--sandbox", f"local:{other}").code == 0
        listed = at(service, store, "attachments").document["attachments"]
        asked = service.http.get("/v1/attachments").json()["attachments"]
        assert [(row["memory"], row["sandbox"]) for row in listed] == [
            ("another", f"local:{other}"),
            ("me", f"local:{home}"),
            ("me", f"local:{other}"),
        ], "by memory and sandbox, whichever came first"
        assert [row["sandbox"] for row in asked] == [row["sandbox"] for row in listed]
        refused = at(service, store, "detach", "me")
        assert (refused.code, refused.error) == (1, "several-attachments")
        assert f"local:{other}" in refused.stderr and "--sandbox REF" in refused.stderr
        assert at(service, store, "detach", "me", "--sandbox", f"local:{other}").code == 0
        assert at(service, store, "detach", "me").code == 0


def test_the_exit_code_tells_what_became_of_the_memory(tmp_path: Path, home: Path) -> None:
    store, other = tmp_path / "store", empty_home(tmp_path / "other")
    write(other / "MEMORY.md", b"in the way" * 20)
    with serving(store, tmp_path / "log") as service:
        assert at(service, store, "attach", "me", "--sandbox", f"local:{home}").code == 0
        assert at(service, store, "detach", "me", "--export").code == 0
        attached = at(service, store, "attach", "me", "--sandbox", f"local:{home}", "--restore")
        assert (attached.code, attached.document["restored"]["outcome"]) == (0, "complete")
        (home / "MEMORY.md").unlink()
        rejected = at(service, store, "detach", "me", "--export")
        assert (rejected.code, rejected.document["exported"]["outcome"]) == (3, "rejected")
        (home / "MEMORY.md").mkdir()
        write(home / "MEMORY.md/file", b"in the way")
        incomplete = at(service, store, "attach", "me", "--sandbox", f"local:{home}", "--restore")
        assert (incomplete.code, incomplete.error) == (4, "restore-incomplete")


def test_without_a_service_nothing_is_done_and_it_says_what_to_do(tmp_path: Path, home: Path) -> None:
    nowhere = {"MEMORY_SIDECAR_URL": f"http://127.0.0.1:{free_port()}"}
    for words in (("attach", "me", "--sandbox", f"local:{home}"), ("detach", "me"), ("attachments",)):
        ran = run_cli(*words, store=tmp_path / "store", env=nowhere)
        assert (ran.code, ran.error) == (1, "no-service")
        assert "memory-sidecar serve --store" in ran.stderr
    assert not (tmp_path / "store").exists()


def test_a_service_on_another_store_is_not_taken_for_one_on_this(tmp_path: Path, home: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log") as service:
        ran = at(service, tmp_path / "another", "attach", "me", "--sandbox", f"local:{home}")
        assert (ran.code, ran.error) == (1, "other-store")
        assert str(tmp_path / "store") in ran.stderr
        assert service.http.get("/v1/attachments").json()["attachments"] == []
        # The same store by another name is the same.
        (tmp_path / "link").symlink_to(tmp_path / "store")
        assert at(service, tmp_path / "link", "attach", "me", "--sandbox", f"local:{home}").code == 0


def test_their_words_are_those_of_the_other_commands() -> None:
    args = build_parser().parse_args(
        ["attach", "me", "--sandbox", "e2b:x", "--project", "/app", "--layout", "pai", "--wake"]
    )
    assert (args.project, args.layout, args.wake, args.restore) == (["/app"], ["pai"], True, False)
