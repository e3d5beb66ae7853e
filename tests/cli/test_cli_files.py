"""Files that commands write for their user: for the user alone, whatever the umask."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.client import Client
from tests.parts.commands import done
from tests.parts.homes import PROJECT, empty_home, run_cli, three_tier_home
from tests.parts.keys import recipient
from tests.parts.services import TOKEN, serving


@pytest.fixture(autouse=True, params=[0o022, 0o000], ids=["022", "000"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _remembered(tmp_path: Path) -> Path:
    home = three_tier_home(empty_home(tmp_path / "home"))
    done("export", "conductor", "--sandbox", f"local:{home}", store=tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.parametrize("there", [False, True])
def test_a_download_is_for_its_owner_alone(tmp_path: Path, there: bool) -> None:
    store, target = _remembered(tmp_path), tmp_path / "out/x.tar.gz"
    target.parent.mkdir()
    if there:
        target.write_bytes(b"an older one")
    with _watched(target.parent) as modes:
        done("download", "conductor", "-o", target, store=store)
    assert _mode(target) == 0o600
    assert modes <= {0o600, 0o644, 0o666} if there else modes <= {0o600}
    assert subprocess.run(["tar", "-tzf", target], capture_output=True).returncode == 0
    assert [*target.parent.iterdir()] == [target]


class _watched:  # noqa: N801 - reads as a statement
    """The modes of all files seen in a folder meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._modes, self._ended = folder, set[int](), threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> set[int]:
        self._thread.start()
        return self._modes

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            for entry in os.scandir(self._folder):
                try:
                    self._modes.add(stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode))
                except FileNotFoundError:
                    continue
            time.sleep(0.0005)


def test_a_download_by_the_client_is_too(tmp_path: Path) -> None:
    store = _remembered(tmp_path)
    with serving(store, tmp_path / "log") as service, Client(service.url, token=TOKEN) as client:
        target = client.download("conductor", "latest", tmp_path / "by-http.tar.gz")
    assert _mode(target) == 0o600


def test_keygen_writes_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"IDENTITY_FILE": tmp_path / "memories.key", "SIGNING_KEY_FILE": tmp_path / "signing.key"}
    told = [
        run_cli("keygen", "-o", keys["IDENTITY_FILE"], store="file:/nowhere"),
        run_cli("keygen", "--signing", "-o", keys["SIGNING_KEY_FILE"], store="file:/nowhere"),
    ]
    assert [ran.code for ran in told] == [0, 0]
    for ran, (name, file) in zip(told, keys.items(), strict=True):
        assert _mode(file) == 0o600
        assert ran.document["file"] == str(file)
        secret = [line for line in file.read_text().splitlines() if not line.startswith(("#", "-----"))]
        assert secret and not any(line in str(ran) for line in secret)
        monkeypatch.setenv(f"MEMORY_SIDECAR_{name}", str(file))
    assert recipient(keys["IDENTITY_FILE"].read_text().splitlines()[-1]) == told[0].document["recipient"]
    home = three_tier_home(empty_home(tmp_path / "home"))
    ran = run_cli("export", "conductor", f"--sandbox=local:{home}", store=tmp_path / "store")
    assert (ran.code, ran.stderr) == (0, "")


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_keygen_overwrites_nothing(tmp_path: Path, kind: str) -> None:
    target, other = tmp_path / "memories.key", tmp_path / "other"
    if kind == "file":
        target.write_text("the only key there is")
    else:
        target.symlink_to(other)
        if kind == "link":
            other.write_text("the only key there is")
    ran = run_cli("keygen", "-o", target, store="file:/nowhere")
    assert (ran.code, ran.error) == (2, "usage")
    assert str(target) in ran.stderr
    if kind == "dangling":
        assert not other.exists()
    else:
        assert target.read_text() == "the only key there is"


def test_keygen_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    ran = run_cli("keygen", "-o", tmp_path / "no/such/memories.key", store="file:/nowhere")
    assert (ran.code, ran.error) == (2, "usage")


def _redirected(target: Path, *words: str) -> str:
    """``memory-sidecar keygen > target``, by a shell; what it says on stderr."""
    ran = subprocess.run(
        ["sh", "-c", '"$0" -m sidecar keygen "$@" > "$TARGET"', sys.executable, *words],
        cwd=PROJECT,
        env={**os.environ, "TARGET": str(target)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran
    return ran.stderr


def test_keygen_closes_the_file_that_a_shell_made_for_it(tmp_path: Path) -> None:
    target = tmp_path / "memories.key"
    assert "0600" in _redirected(target)
    assert _mode(target) == 0o600
    assert target.read_text().splitlines()[-1].startswith("AGE-SECRET-KEY-1")
    assert _redirected(target) == ""  # which it is now
    assert "0600" in _redirected(tmp_path / "json", "--json")
    assert json.loads((tmp_path / "json").read_text())["kind"] == "age"


def test_keygen_to_a_pipe_or_a_device_changes_nothing_else() -> None:
    ran = subprocess.run([sys.executable, "-m", "sidecar", "keygen"], cwd=PROJECT, capture_output=True, timeout=60)
    assert ran.stdout.splitlines()[-1].startswith(b"AGE-SECRET-KEY-1")
    assert ran.stderr == b""
    before = os.stat(os.devnull).st_mode
    assert _redirected(Path(os.devnull)) == ""
    assert os.stat(os.devnull).st_mode == before
