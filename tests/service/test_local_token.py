"""The token that a service on loopback makes at its first start, who finds it, and what keeps others from it."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.client import Client
from sidecar.client.settings import build_client_settings
from sidecar.errors import BadConfig
from sidecar.host.local_token import ensure_token, find_token_path, read_token
from tests.parts import forked_sidecar
from tests.parts.homes import PROJECT, empty_home
from tests.parts.s3_servers import free_port
from tests.parts.services import TOKEN, printed, serving, without_settings

pytestmark = pytest.mark.usefixtures("forked_programs")

A_TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state home that is not there yet."""
    folder = tmp_path / "new" / "state home"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


def kept(state: Path) -> Path:
    return state / "memory-sidecar" / "token"


def keep(state: Path, text: str = A_TOKEN, mode: int = 0o600) -> Path:
    file = kept(state)
    file.parent.mkdir(parents=True, mode=0o700)
    file.write_text(text)
    file.chmod(mode)
    return file


def refused(tmp_path: Path, *words: str, **more: str) -> str:
    """What a service that does not start says."""
    command = ["serve", f"--store=file:{tmp_path}/store", "--bind=127.0.0.1:0", *words]
    ran = forked_sidecar.run(command, env=without_settings(**more), text=True)
    assert ran.returncode == 2, ran
    assert "Traceback" not in ran.stderr and A_TOKEN not in ran.stderr + ran.stdout
    return ran.stderr


def test_the_first_start_makes_a_token_and_later_ones_keep_it(tmp_path: Path, state: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log", given_token="") as service:
        token = kept(state).read_text().strip()
        assert re.fullmatch("[0-9a-f]{64}", token)
        assert stat.S_IMODE(kept(state).stat().st_mode) == 0o600
        assert stat.S_IMODE(kept(state).parent.stat().st_mode) == 0o700
        assert [file.name for file in kept(state).parent.iterdir()] == ["token"]
        bearer = {"Authorization": f"Bearer {token}"}
        assert service.http.get("/v1/memories").status_code == 401
        assert service.http.get("/v1/memories", headers=bearer).status_code == 200
        service.stop()
        service.start()
        assert service.http.get("/v1/memories", headers=bearer).status_code == 200
        with serving(tmp_path / "other", tmp_path / "log2", given_token="") as second:
            assert second.http.get("/v1/memories", headers=bearer).status_code == 200
        assert token not in service.log.read_text() and kept(state).read_text().strip() == token


def test_services_that_start_at_the_same_time_agree(state: Path) -> None:
    program = "from sidecar.host.local_token import ensure_token; print(ensure_token())"
    started = [
        subprocess.Popen([sys.executable, "-c", program], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
        for _ in range(12)
    ]
    tokens = {process.communicate(timeout=60)[0].strip() for process in started}
    assert tokens == {kept(state).read_text().strip()}
    assert [file.name for file in kept(state).parent.iterdir()] == ["token"]


@pytest.mark.parametrize("curl", [True, False])
def test_the_printed_calls_end_in_a_restored_memory_on_any_machine(tmp_path: Path, state: Path, curl: bool) -> None:
    if curl and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    home = empty_home(tmp_path / "home")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "mktemp", "mkdir", "cat", *(["curl"] if curl else [])):
        (tools / name).symlink_to(shutil.which(name) or name)
    with printed(tmp_path, terminal=False, env={"PATH": str(tools)}) as said:
        token = kept(state).read_text().strip()
        assert token not in said
        calls = re.findall(r"^  (.*)$", said, re.MULTILINE)
        assert [("curl" in call) for call in calls] == [False, curl, curl, False]
        ran = subprocess.run(
            ["sh", "-ec", "\n".join(calls)],
            env=without_settings(HOME=str(home), TMPDIR=str(tmp_path), PATH=str(tools), PYTHONPATH=str(PROJECT)),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ran.returncode == 0 and ran.stderr == "", ran
    assert "committed" in ran.stdout and "complete" in ran.stdout
    assert ran.stdout.endswith("The database team reviews migrations; ask before one.\n")
    assert [path.name for path in home.iterdir()] == []


def test_on_a_terminal_a_link_to_the_page_has_the_token_and_elsewhere_it_does_not(tmp_path: Path, state: Path) -> None:
    with printed(tmp_path, terminal=True) as said:
        token = kept(state).read_text().strip()
        assert re.search(rf"http://127\.0\.0\.1:\d+/#token={token}\n", said)
        assert f"kept in {kept(state)}" in said
    with printed(tmp_path, terminal=True, env={"MEMORY_SIDECAR_TOKEN": TOKEN}) as said:
        assert TOKEN not in said and "#token" not in said and "$MEMORY_SIDECAR_TOKEN" in said.replace("{", "")
    with printed(tmp_path, terminal=True, env={"MEMORY_SIDECAR_SERVICE_TOKEN": "off"}) as said:
        assert "token" not in said.lower().replace(str(PROJECT).lower(), "")


def test_with_a_token_given_or_none_wanted_nothing_is_made(tmp_path: Path, state: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{A_TOKEN}\n")
    with serving(tmp_path / "a", tmp_path / "a.log") as service:
        assert service.http.get("/v1/memories").status_code == 200
    with serving(tmp_path / "b", tmp_path / "b.log", given_token="", token_file=str(tokens)) as service:
        assert service.http.get("/v1/memories").status_code == 401
        bearer = {"Authorization": f"Bearer {A_TOKEN}"}
        assert service.http.get("/v1/memories", headers=bearer).status_code == 200
    with serving(tmp_path / "c", tmp_path / "c.log", given_token="", token="off") as service:
        assert service.http.get("/v1/memories").status_code == 200
    assert "MEMORY_SIDECAR_TOKEN" in refused(tmp_path, "--bind=0.0.0.0:0")
    assert not state.exists()


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (A_TOKEN, 0o644, "can be read or changed by others (mode 0644)"),
        (A_TOKEN, 0o620, "can be read or changed by others"),
        ("", 0o600, "does not hold a token"),
        ("short", 0o600, "does not hold a token"),
        (f"{A_TOKEN}\n{A_TOKEN}", 0o600, "does not hold a token"),
        (f"{A_TOKEN} \x00ü", 0o600, "does not hold a token"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_refused(state: Path, text: str, mode: int, words: str) -> None:
    file = keep(state, text, mode)
    for use in (ensure_token, read_token, lambda: Client("http://127.0.0.1:1")):
        with pytest.raises(BadConfig) as raised:
            use()
        assert words in raised.value.message and str(file) in raised.value.message
        assert A_TOKEN not in str(raised.value.as_dict()) and "Remove it" in raised.value.hint
    assert file.read_text() == text, "it was changed"
    file.unlink()
    assert ensure_token() == read_token() != ""


def test_a_service_does_not_start_with_a_token_that_others_could_have_read(tmp_path: Path, state: Path) -> None:
    file = keep(state, A_TOKEN, 0o644)
    said = refused(tmp_path)
    assert "can be read or changed by others (mode 0644)" in said and str(file) in said and "Remove it" in said
    file.unlink()
    with serving(tmp_path / "store", tmp_path / "log", given_token="") as service:
        assert Client(service.url).memories() == []


def test_a_link_a_pipe_or_a_file_of_somebody_else_is_refused(tmp_path: Path, state: Path) -> None:
    def objection() -> str:
        with pytest.raises(BadConfig) as raised:
            ensure_token()
        return raised.value.message

    file = keep(state)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert "cannot be read" in objection()
    file.unlink()
    os.mkfifo(file, 0o600)
    assert "is not an ordinary file" in objection()
    file.unlink()
    if os.geteuid() == 0:
        (tmp_path / "elsewhere").rename(file)
        os.chown(file, 12345, -1)
        assert "belongs to another user" in objection()
        file.unlink()
        os.chown(file.parent, 12345, -1)
        assert "belongs to another user" in objection()
        os.chown(file.parent, 0, -1)
    file.parent.chmod(0o777)
    assert "Others may write to the folder" in objection()
    assert not file.exists()
    file.parent.chmod(0o700)
    assert ensure_token() == file.read_text().strip()


def test_where_no_token_can_be_kept_it_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    for place in (tmp_path / "a file", tmp_path / "a file" / "below"):
        said = refused(tmp_path, XDG_STATE_HOME=str(place))
        for words in ("cannot be kept in", "XDG_STATE_HOME", "MEMORY_SIDECAR_TOKEN", 'token = "off"'):
            assert words in said
    config = tmp_path / "c.toml"
    config.write_text("[service]\n\ntoken = 'auto'\n")
    assert f"{config}:3" in refused(tmp_path, f"--config={config}", XDG_STATE_HOME=str(tmp_path / "a file"))


def test_the_setting_never_shows_what_it_was_set_to(tmp_path: Path) -> None:
    said = refused(tmp_path, MEMORY_SIDECAR_SERVICE_TOKEN=A_TOKEN)
    assert 'must be "auto" or "off"' in said and "MEMORY_SIDECAR_TOKEN" in said


def test_a_client_on_this_machine_finds_it_and_the_environment_wins(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "store", tmp_path / "log", given_token="") as service:
        assert Client(service.url).memories() == []
        assert Client(service.url.replace("127.0.0.1", "localhost")).memories() == []
    file = kept(state)
    for address in ("http://127.0.0.1:1", "http://localhost:1", "https://[::1]:1", "http://127.9.9.9"):
        assert _sent_to(address) == f"Bearer {file.read_text().strip()}"
        assert _sent_to(address, token="") is None
        assert _sent_to(address, token=A_TOKEN) == f"Bearer {A_TOKEN}"
    monkeypatch.setenv("MEMORY_SIDECAR_TOKEN", TOKEN)
    assert _sent_to("http://127.0.0.1:1") == f"Bearer {TOKEN}"


@pytest.mark.parametrize(
    "address",
    [
        *("http://example.com", "http://127.0.0.1.evil.test", "http://localhost.evil.test", "http://128.0.0.1"),
        *(
            "https://evil.test/127.0.0.1",
            "http://0.0.0.0:1",
            "http://10.0.0.7:8077",
            "http://[::2]",
            "http://evil.localhost",
        ),
    ],
)
def test_a_client_sends_it_nowhere_else(state: Path, address: str) -> None:
    assert ensure_token() == read_token() != ""
    assert _sent_to(address) is None


def _sent_to(address: str, **given: Any) -> str | None:
    """The token that a client sends along to a service there."""
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200)

    settings = build_client_settings(address, given.get("token"), 1.0)
    with httpx.Client(**settings, transport=httpx.MockTransport(answer)) as http:
        http.get("/v1/memories")
    return seen[0]


def test_a_client_that_was_there_before_the_first_service_finds_its_token(tmp_path: Path, state: Path) -> None:
    port = free_port()
    client = Client(f"http://127.0.0.1:{port}")
    assert not state.exists()
    with serving(tmp_path / "store", tmp_path / "log", given_token="", bind=f"127.0.0.1:{port}"):
        assert client.memories() == []
        kept(state).chmod(0o644)
        with pytest.raises(BadConfig, match="by others"):
            client.memories()


def test_a_command_beside_the_service_has_the_same_token(tmp_path: Path, state: Path) -> None:
    program = "import os, sidecar.client as c; print(os.environ['MEMORY_SIDECAR_TOKEN'], c.Client().memories())"
    command = ["run", f"--store=file:{tmp_path}/store", "--", sys.executable, "-c", program]

    def said(**more: str) -> str:
        ran = forked_sidecar.run(command, env=without_settings(**more), text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.splitlines()[-1]

    own = said()
    assert own == f"{kept(state).read_text().strip()} []"
    nowhere = said(XDG_STATE_HOME="/dev/null/nowhere")
    assert re.fullmatch(r"[0-9a-f]{64} \[\]", nowhere) and nowhere != own
    kept(state).chmod(0o644)
    ran = forked_sidecar.run(command, env=without_settings(), text=True)
    assert ran.returncode == 2 and "by others" in ran.stderr and "Traceback" not in ran.stderr


def test_it_is_kept_where_the_state_of_programs_belongs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_STATE_HOME", unset)
        assert find_token_path() == tmp_path / ".local/state/memory-sidecar/token"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert ensure_token() == (tmp_path / ".local/state/memory-sidecar/token").read_text().strip()
