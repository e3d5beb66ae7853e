"""``config check`` finds what ``serve`` refuses, by the same code, all of it at once, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sidecar.cli.main import main
from tests.parts import forked_sidecar
from tests.parts.homes import run_cli, tree
from tests.parts.keys import identity

REFUSED: dict[str, tuple[str, str]] = {
    "no token for all addresses": ('[service]\nbind = "0.0.0.0:0"\n', "Set MEMORY_SIDECAR_TOKEN"),
    "an unmounted volume": ('store = "volume:{here}/volume"\n', "No volume is mounted"),
    "a bad recipient": ('[encryption]\nrecipients = ["age1nobody"]\n', "'age1nobody' is no age recipient"),
    "a missing token file": ('[service]\ntoken_file = "{here}/none"\n', "/none cannot be read"),
    "an unreachable store": ('store = "s3://b?endpoint=http://127.0.0.1:1&region=x"\n', "127.0.0.1:1"),
    "an unknown event": (
        '[[webhooks]]\nurl = "https://x"\nevents = ["export.commited"]\n',
        "Did you mean 'export.committed'?",
    ),
    "a pattern of events that matches none": ('[[webhooks]]\nurl = "https://x"\nevents = ["exports.*"]\n', "no event"),
    "a webhook without events": ('[[webhooks]]\nurl = "https://x"\nevents = []\n', "never be called"),
    "a pattern of memories that matches none": ('[limits.memories."acme/../x"]\nfiles = 9\n', "it fits no memory"),
    "a class in a pattern of memories": ('[limits.memories."acme/[ab]*"]\nfiles = 9\n', "has no [classes]"),
    "a class in what is to be reviewed": ('[review]\nrequired = ["acme/[*"]\n', "has no [classes]"),
    "a class in what is watched": ('[[watch]]\nprovider = "e2b"\nmemories = ["acme/[*"]\n', "has no [classes]"),
    "a pattern of paths that matches none": (
        '[layouts.n]\nkeep = ["./notes/**"]\n[[layouts.n.roots]]\nname = "n"\npaths = ["~/n"]\n',
        "'./notes/**' can match no path",
    ),
    "an address of another machine": (
        '[service]\nbind = "192.0.2.1:8077"\ntoken_file = "{here}/token"\n',
        "listened on",
    ),
    "a schedule that never comes": (
        '[service]\ndrill_at = "0 4 31 2 *"\n',
        "c.toml:2: [service] drill_at = '0 4 31 2 *'",
    ),
    "a time zone that is none": ('[service]\ntimezone = "Europe/Berlni"\n', "Did you mean 'Europe/Berlin'?"),
    "an audit that cannot be written": (
        '[audit]\nfile = "{here}/none/audit.jsonl"\n',
        "none/audit.jsonl cannot be written",
    ),
    "a missing key file": ('[encryption]\nidentity_files = ["{here}/key"]\n', "/key cannot be read"),
}


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MEMORY_SIDECAR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")


def _config(folder: Path, text: str) -> Path:
    (folder / "volume").mkdir()
    (folder / "token").write_text("0123456789abcdef0123456789abcdef\n")
    file = folder / "c.toml"
    file.write_text(text.format(here=folder))
    return file


@pytest.mark.parametrize("what", REFUSED)
def test_what_serve_refuses_is_found_in_its_words(what: str, tmp_path: Path) -> None:
    text, said = REFUSED[what]
    config = _config(tmp_path, text)
    served = forked_sidecar.run(["serve", f"--config={config}"], text=True)
    assert served.returncode in (1, 2) and said in served.stderr and "Traceback" not in served.stderr, served.stderr

    checked = run_cli("config", "check", f"--config={config}", store="")
    assert checked.code == served.returncode and checked.document["ok"] is False
    (problem,) = checked.document["problems"]
    assert said in f"{problem['message']} {problem['hint']}"
    assert problem["message"] in served.stderr


def test_all_that_is_wrong_is_said_at_once_and_the_verdict_comes_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(
        tmp_path,
        'store = "volume:{here}/volume"\n[service]\nbind = "0.0.0.0:0"\ntls_cert = "{here}/none"\ntls_key = "{here}/none"\n',
    )
    assert main(["config", "check", f"--config={config}"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines[-4:]] == ["Wrong"] * 3 + ["The configuration is not right"]
    assert "3 problems" in lines[-1]


def test_only_what_differs_from_the_defaults_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check"]) == 0
    first, verdict = capsys.readouterr().out.splitlines()
    assert first == "Every option has its default value." and verdict.startswith("The configuration is right")
    config = _config(tmp_path, "[limits]\nfiles = 7\n[service]\ngrace = 25.0\n")
    assert main(["config", "check", f"--config={config}", "--bind=127.0.0.1:0"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[:-1]]
    assert [(row[0], row[1]) for row in rows[1:]] == [("limits.files", "7"), ("service.bind", "127.0.0.1:0")]
    checked = run_cli("config", "check", f"--config={config}", store="")
    assert checked.document["ok"] is True and checked.document["changed"] == {"limits.files": 7}


def test_a_key_that_the_service_will_need_is_missed_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("E2B_API_KEY", "E2B_ACCESS_TOKEN", "DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    text = '[[watch]]\nprovider = "e2b"\nmemories = ["a"]\n[[start]]\nmemory = "me"\non = "daytona:"\n'
    config = _config(tmp_path, text + '[[start]]\nmemory = "here"\non = "local:"\n')
    checked = run_cli("config", "check", f"--config={config}", store="")
    about = [line.partition(" is not set")[0] for line in checked.document["warnings"]]
    assert checked.code == 0 and about == ["[[watch]] e2b: E2B_API_KEY", "[[start]] me: DAYTONA_API_KEY"]
    monkeypatch.setenv("E2B_API_KEY", "x")
    monkeypatch.setenv("DAYTONA_API_KEY", "x")
    assert run_cli("config", "check", f"--config={config}", store="").document["warnings"] == []


def test_schedules_are_shown_with_their_next_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '[retention]\nat = "30 2 * * *"\n[service]\ntimezone = "Asia/Kolkata"\ncheckpoint_at = "55 17 * * 1-5"\n'
    config = _config(tmp_path, text)
    checked = run_cli("config", "check", f"--config={config}", store="").document
    retention, checkpoints = checked["schedule"]
    assert (retention["option"], retention["expression"]) == ("retention.at", "30 2 * * *")
    assert retention["timezone"] == "Asia/Kolkata"
    assert [due[10:] for due in retention["next"]] == ["T02:30:00+05:30"] * 3
    assert checkpoints["option"] == "service.checkpoint_at" and len(set(checkpoints["next"])) == 3
    assert main(["config", "check", f"--config={config}"]) == 0
    assert "T02:30:00+05:30" in capsys.readouterr().out


def test_the_address_that_serve_will_be_told_is_checked(tmp_path: Path) -> None:
    assert run_cli("config", "check", "--bind=0.0.0.0:0", store="").code == 2
    checked = run_cli(
        "config", "check", "--bind=0.0.0.0:0", store="", env={"MEMORY_SIDECAR_TOKEN": "0123456789abcdef0123"}
    )
    assert checked.code == 0


def test_a_check_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMORY_SIDECAR_IDENTITY", identity())
    plain = tmp_path / "plain"
    plain.mkdir()
    before = tree(tmp_path)
    assert run_cli("config", "check", store="").code == 0
    assert run_cli("config", "check", store=tmp_path / "deep/store").code == 0
    # A store that others use unencrypted does not become an encrypted one by a look at a config.
    assert run_cli("config", "check", store=plain).code == 0
    assert tree(tmp_path) == before


def test_a_port_that_the_running_service_has_is_no_mistake(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        checked = run_cli("config", "check", f"--bind=127.0.0.1:{taken.getsockname()[1]}", store="")
        assert checked.code == 0 and "is in use" in checked.document["warnings"][0]


def test_a_port_in_use_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        ran = forked_sidecar.run(["serve", f"--bind={bind}"], text=True)
    (line,) = ran.stderr.splitlines()
    assert ran.returncode == 2 and line.startswith(
        f"memory-sidecar: {bind} cannot be listened on: Address already in use"
    )
    assert "--bind" in line
