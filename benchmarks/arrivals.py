"""Sandboxes that name their memory and are created one after the other, at a provider 100 ms away: how long each waits for it,
and how often the provider is asked for a list.

The service is one that is not told otherwise: four exports and restores at once, and those that came before are exported
every 30 s meanwhile. What runs in the sandboxes runs on this machine too, and takes more of its time than the service: how
much is said.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

from benchmarks.measure import PROJECT
from benchmarks.table import Section, seconds
from emulators import E2BEmulator, E2BSandbox

TOKEN = "a-token-for-the-benchmark-0123456789"
SECRET = "a-secret-for-the-benchmark-0123456789"
LATENCY = 0.1
PORT = 8079
SIGN = ".cache/memory-sidecar/ready.json"
PATIENCE_SECONDS = 300.0
CONFIG = """
[[watch]]
provider = "e2b"
memories = ["acme/*"]
{more}
"""
HOOKS = 'secret_env = "BENCHMARK_SECRET"'
WAYS = {"by listing": "", "by webhooks and listing": HOOKS}
"""How they are noticed."""


def measure(folder: Path, count: int, over: float) -> Section:
    """``count`` sandboxes are created within ``over`` seconds, each with a memory of its own."""
    section = Section(f"{count} sandboxes that name their memory, created within {over:.0f} s")
    for way, more in WAYS.items():
        (folder / way).mkdir(parents=True)
        (folder / way / "config.toml").write_text(CONFIG.format(more=more))
        with E2BEmulator() as server:
            server.latency = LATENCY
            if more:
                server.send_webhooks(f"http://127.0.0.1:{PORT}/v1/hooks/e2b", SECRET)
            _measure_way(section, folder / way, way, server, count, over)
    return section


def _measure_way(section: Section, folder: Path, way: str, server: E2BEmulator, count: int, over: float) -> None:
    environment = {
        **os.environ,
        **server.environment(),
        "MEMORY_SIDECAR_TOKEN": TOKEN,
        "BENCHMARK_SECRET": SECRET,
        "XDG_STATE_HOME": str(folder / "state"),
    }
    words = ["serve", f"--store=file:{folder}/store", f"--bind=127.0.0.1:{PORT}", f"--config={folder}/config.toml"]
    service = subprocess.Popen(
        [sys.executable, "-m", "sidecar", *words],
        cwd=PROJECT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert service.stdout is not None
        service.stdout.readline()
        _make_memories(folder, count)
        server.clear()
        began, used, inside, own = time.monotonic(), _read_cpu(service.pid), _read_children_cpu(), time.process_time()
        waited = _create(server, count, over)
        lasted = time.monotonic() - began
        own = time.process_time() - own
        lists, used, inside = server.count("list"), _read_cpu(service.pid) - used, _read_children_cpu() - inside
    finally:
        service.kill()
        service.wait(60)
    found = sorted(waited.values())
    section.add(f"{way}: have their memory", f"{len(found)} of {count}", f"all within {seconds(lasted)}")
    slices = [found[min(len(found) - 1, int(len(found) * share))] for share in (0.5, 0.95, 1.0)]
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    section.add(f"{way}: p50, p95, slowest", ", ".join(map(seconds, slices)), f"load of the machine: {load}")
    rate = f"{lists / lasted:.2f} a second"
    cpu = f"CPU time: the service {seconds(used)}, in the sandboxes {seconds(inside)}, the emulated provider {seconds(own)}"
    section.add(f"{way}: requests for a list", f"{lists}, {rate}", cpu)


def _make_memories(folder: Path, count: int) -> None:
    home = folder / "home"
    (home / "memory").mkdir(parents=True)
    (home / "MEMORY.md").write_text("# remembered\n" * 50)
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        sandbox = {"sandbox": f"local:{home}"}
        client.post("/v1/memories/template/exports", json=sandbox, timeout=60).raise_for_status()
        for number in range(count):
            body = {"memory": f"acme/{number}"}
            client.post("/v1/memories/template/forks", json=body, timeout=60).raise_for_status()


def _create(server: E2BEmulator, count: int, over: float) -> dict[str, float]:
    """Create them, and return how long each waited for its memory."""
    waiting: dict[E2BSandbox, float] = {}
    waited: dict[str, float] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            for sandbox, created in list(waiting.items()):
                if (sandbox.home / SIGN).exists():
                    waited[sandbox.id] = time.monotonic() - created
                    del waiting[sandbox]

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, began + number * over / count - time.monotonic()))
        created = time.monotonic()
        waiting[server.create(metadata={"memory": f"acme/{number}"}, timeout=3600)] = created
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(waited) < count and time.monotonic() < deadline:
        time.sleep(0.2)
    done.set()
    watching.join()
    return waited


def _read_cpu(pid: int) -> float:
    """Return the CPU seconds of a process; 0 where that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _read_children_cpu() -> float:
    """Return the CPU seconds of what has run in the sandboxes."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime
