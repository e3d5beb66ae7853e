"""The first hour: what a new user types, as the README and the service print it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.parts.homes import PROJECT, empty_home, run_cli
from tests.parts.services import serving


def test_a_sample_home_is_made_and_nothing_is_overwritten(tmp_path: Path) -> None:
    home = tmp_path / "new" / "home"
    made = run_cli("demo", "--home", home, store=tmp_path / "store")
    assert made.code == 0 and {"MEMORY.md", ".claude-mem/claude-mem.db"} <= set(made.document["files"])
    exported = run_cli("export", "sample", "--sandbox", f"local:{home}", store=tmp_path / "store")
    assert exported.document["outcome"] == "committed" and exported.document["files"] == 4
    again = run_cli("demo", "--home", home, store=tmp_path / "store")
    assert (again.code, again.error) == (2, "usage") and "not empty" in again.document["error"]["message"]


def test_the_demo_shows_a_memory_that_came_back(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "sidecar", "demo"], cwd=PROJECT, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert "The deploy key lives in the vault" in ran.stdout and "SQLite's integrity check: ok." in ran.stdout
    before, now = re.findall(r"(\S+) rows", ran.stdout)
    assert before == now
    quiet = run_cli("demo", store=tmp_path, env={})
    assert quiet.document["ok"] is True


def _planned(folder: Path, target: str) -> str:
    """What make would do there."""
    return subprocess.run(
        ["make", "-n", "-B", "-C", str(folder), target], capture_output=True, text=True, timeout=30, check=True
    ).stdout


def test_make_run_installs_nothing_for_tests_and_does_so_in_sight(tmp_path: Path) -> None:
    plan = _planned(PROJECT, "run")
    installs = [line for line in plan.splitlines() if "pip install" in line]
    assert installs and not any("dev" in line or "--quiet" in line for line in installs)
    assert "--group dev" in _planned(PROJECT, "test") and ".venv/bin/memory-sidecar serve" in plan.splitlines()


def test_a_wheel_has_every_package_that_its_commands_need() -> None:
    packages = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert packages["packages"] == ["sidecar", "adapters", "emulators"]


@pytest.mark.parametrize("provider", ["e2b", "daytona"])
def test_an_emulator_prints_calls_that_work(provider: str, tmp_path: Path) -> None:
    emulator = subprocess.Popen(
        [sys.executable, "-m", "emulators", provider], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    assert emulator.stdout is not None
    try:
        lines: list[str] = []
        while not lines or not lines[-1].startswith("memory-sidecar export"):
            lines.append(emulator.stdout.readline())
            assert lines[-1], lines
        script = "".join(lines).replace("memory-sidecar ", f"{sys.executable} -m sidecar ")
        env = {**os.environ, "MEMORY_SIDECAR_STORE": f"file:{tmp_path}/store"}
        ran = subprocess.run(["sh", "-ec", script], cwd=PROJECT, env=env, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0 and "sample: committed" in ran.stdout, ran
    finally:
        emulator.send_signal(signal.SIGTERM)
        emulator.wait(30)


def test_an_emulator_names_the_sdk_that_is_missing() -> None:
    script = "import runpy, sys; sys.modules['e2b'] = None; runpy.run_module('emulators', None, '__main__')"
    emulator = subprocess.Popen([sys.executable, "-c", script, "e2b"], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    assert emulator.stdout is not None
    try:
        assert any("pip install 'memory-sidecar[e2b]'" in emulator.stdout.readline() for _ in range(8))
    finally:
        emulator.send_signal(signal.SIGTERM)
        emulator.wait(30)


def _section() -> dict[str, str]:
    """The blocks of the README's five minutes, by their language; of the shell's, all in one."""
    text = (PROJECT / "README.md").read_text().partition("## Five minutes")[2].partition("\n## ")[0]
    blocks: dict[str, str] = {}
    for language, block in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL):
        blocks[language] = blocks.get(language, "") + block
    assert blocks.keys() == {"sh", "python", "ts"}
    return blocks


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A service with the token that it keeps; whoever is started finds both."""
    for name in [name for name in os.environ if name.startswith("MEMORY_SIDECAR_")]:
        monkeypatch.delenv(name)
    with serving(tmp_path / "store", tmp_path / "log", given_token="") as service:
        monkeypatch.setenv("MEMORY_SIDECAR_URL", service.url)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        yield


REMEMBERED = re.compile(
    r"1: empty\. Nothing known yet\.\n1: committed \S+\n"
    r"2: complete\. Learned in conversation 1: the deploy key lives in the vault\.\n\n2: committed \S+\n"
)


def test_the_readmes_python_conductor_remembers(served: None, tmp_path: Path) -> None:
    (tmp_path / "conductor.py").write_text(_section()["python"])
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "conductor.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert REMEMBERED.fullmatch(ran.stdout), ran


def test_the_readmes_typescript_conductor_remembers(served: None, tmp_path: Path) -> None:
    if not (node := _node()):
        pytest.skip("no node that takes TypeScript is installed")
    (tmp_path / "conductor.mts").write_text(_section()["ts"])
    ran = subprocess.run([node, "conductor.mts"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert REMEMBERED.fullmatch(ran.stdout), ran


def _node() -> str:
    """A node that runs TypeScript as it is: the machine's own, or the one that comes with Playwright. Empty: there is none."""
    driver = find_spec("playwright")
    own = Path(driver.origin).parent / "driver/node" if driver and driver.origin else Path("node")
    for node in filter(None, (shutil.which("node"), shutil.which(own))):
        said = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
        if tuple(int(part) for part in said.strip().removeprefix("v").split(".")[:2]) >= (22, 18):
            return node
    return ""


def test_the_readmes_commands_for_operators_work(tmp_path: Path) -> None:
    script = _section()["sh"].partition("export MEMORY_SIDECAR_TOKEN")
    lines = [line for line in (script[1] + script[2]).splitlines() if not line.startswith("memory-sidecar serve")]
    assert len(lines) == 4
    typed = "\n".join(lines).replace("memory-sidecar ", f"{sys.executable} -m sidecar ").replace(":8078", ":0")
    env = {name: value for name, value in os.environ.items() if not name.startswith("MEMORY_SIDECAR_")}
    ran = subprocess.run(
        ["sh", "-ec", typed],
        cwd=PROJECT,
        env={**env, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0 and "The configuration is right" in ran.stdout and "!!" not in ran.stdout, ran


@pytest.mark.slow
def test_from_a_fresh_clone_to_a_restored_memory(tmp_path: Path) -> None:
    """Needs a package index, or a warm cache of one."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(PROJECT), str(clone)], check=True)
    home = empty_home(tmp_path / "home")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MEMORY_SIDECAR_", "XDG_"))}
    env |= {"MEMORY_SIDECAR_SERVICE_BIND": "127.0.0.1:0", "XDG_STATE_HOME": str(tmp_path / "state")}
    env |= {"XDG_DATA_HOME": str(tmp_path / "data")}
    service = subprocess.Popen(
        ["make", "-C", str(clone), "run"], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert service.stdout is not None
    try:
        calls: list[str] = []
        for line in service.stdout:
            if (line.startswith("  ") and calls) or line.startswith("  d=$(mktemp"):
                calls.append(line)
            if "cat $d" in line:
                break
        ran = subprocess.run(["sh", "-ec", "".join(calls)], env=env, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0 and "The deploy key lives in the vault" in ran.stdout, ran
    finally:
        os.killpg(service.pid, signal.SIGTERM)
        service.wait(60)
    used = sum(file.lstat().st_size for file in (clone / ".venv").rglob("*") if not file.is_symlink())
    assert used < 400 << 20 and not (clone / ".venv/bin/pytest").exists()
    # As anyone would install it, used from elsewhere.
    plain = [
        str(clone / ".venv/bin/python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--force-reinstall",
        "--no-deps",
        str(clone),
    ]
    subprocess.run(plain, check=True)
    shutil.rmtree(clone / "emulators")
    for words in (["memory-sidecar", "demo"], ["python", "-m", "emulators", "--help"]):
        ran = subprocess.run(
            [str(clone / ".venv/bin" / words[0]), *words[1:]], cwd=home, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran
