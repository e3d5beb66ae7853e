"""Many conversations that end in the same second: the service on a real S3 server, with as many callers at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

from benchmarks import homes
from benchmarks.measure import PROJECT
from benchmarks.table import Section, seconds, size
from tests.parts.s3_servers import seaweedfs

# In a process of its own: beside two hundred threads it would measure how long it waits for its own turn.
PROBE = """
import select, sys, time, httpx
with httpx.Client(timeout=30) as client:
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        asked = time.monotonic()
        client.get(sys.argv[1] + "/healthz").raise_for_status()
        print(time.monotonic() - asked)
"""
TOKEN = "a-token-for-the-benchmark-0123456789"


def measure(folder: Path, count: int, database: int) -> Section:
    section = Section(f"{count} conversations that end at once, {size(database)} of memory each, on S3")
    template = folder / "template"
    homes.claude_mem(template, database, homes.Words(11, 4 << 20))
    for number in range(count):
        shutil.copytree(template, folder / f"home{number}")
    with seaweedfs() as server:
        environment = {**os.environ, **server.environment(), "MEMORY_SIDECAR_TOKEN": TOKEN}
        store = f"s3://{server.make_bucket('benchmark-load')}/x?endpoint={server.endpoint}"
        words = [sys.executable, "-m", "sidecar", "serve", f"--store={store}", "--bind=127.0.0.1:8079"]
        service = subprocess.Popen(
            words, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            assert service.stdout is not None
            service.stdout.readline()
            _run(section, folder, count, service.pid)
        finally:
            service.terminate()
            service.wait(60)
    return section


def _run(section: Section, folder: Path, count: int, pid: int) -> None:
    url, headers = "http://127.0.0.1:8079", {"Authorization": f"Bearer {TOKEN}"}
    took: list[float] = []
    outcomes: list[str] = []

    def end(number: int) -> None:
        began = time.monotonic()
        body = {"sandbox": f"local:{folder}/home{number}"}
        with httpx.Client(timeout=900, headers=headers) as client:
            answer = client.post(f"{url}/v1/memories/m{number}/exports", json=body)
        took.append(time.monotonic() - began)
        outcomes.append(answer.json().get("outcome", str(answer.status_code)))

    began = time.monotonic()
    callers = [threading.Thread(target=end, args=[number]) for number in range(count)]
    for caller in callers:
        caller.start()
    probe = subprocess.Popen([sys.executable, "-c", PROBE, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for caller in callers:
        caller.join()
    whole = time.monotonic() - began
    probes = sorted(float(line) for line in probe.communicate()[0].split())
    took.sort()
    peak = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    section.add("exported", f"{outcomes.count('committed')} of {count}", f"all in {seconds(whole)}")
    section.add("p50, p95, slowest", ", ".join(seconds(took[int(len(took) * part)]) for part in (0.5, 0.95, 0.999)))
    section.add("peak RSS of the service", size(int(peak.split()[1]) * 1024))
    section.add(
        "/healthz meanwhile, p95 and slowest", f"{seconds(probes[int(len(probes) * 0.95)])}, {seconds(probes[-1])}"
    )
