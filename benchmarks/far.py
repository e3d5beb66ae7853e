"""A store that is far away: what the service asks a real S3 server for 20 ms away, of one memory, of many memories, and of a
memory with a long history."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import httpx
import urllib3

from benchmarks import homes
from benchmarks.measure import PROJECT, sidecar
from benchmarks.table import Section, seconds, size
from sidecar.ids import (
    ROOT,
    MemoryKeys,
    build_memory_key,
    build_portable_folder,
    make_snapshot_id,
    parse_snapshot_time,
)
from sidecar.store.folder_names import SIGNPOST
from sidecar.store.manifest import Head, Manifest
from tests.parts.far_s3 import FarServer, far_server
from tests.parts.s3_servers import S3Server, seaweedfs

TOKEN = "a-token-for-the-benchmark-0123456789"
MEMORY = "m"
DELAY = 0.02
IDLE_SECONDS = 30.0
PAGE = 50
FEW = 10
"""Snapshots of a memory with a short history."""
WRITERS = 8


@dataclass
class Scene:
    """A bucket of the server, the same server far away, and a folder for homes."""

    server: S3Server
    far: FarServer
    bucket: str
    folder: Path

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/x?endpoint={self.far.endpoint}"

    def export(self, home: Path) -> None:
        """Export a home by command."""
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        sidecar("export", MEMORY, f"--sandbox=local:{home}", store=self.url, temporary=temporary)

    def read(self, key: str) -> bytes:
        data: bytes = self.server.client.get_object(Bucket=self.bucket, Key=f"x/{key}")["Body"].read()
        return data

    def read_memory(self) -> tuple[Head, Manifest, dict[str, bytes]]:
        """Return the head of the one memory, its manifest, and its packs and their indexes by what follows its prefix."""
        keys = MemoryKeys.of(MEMORY)
        head = Head.decode(self.read(keys.head), MEMORY)
        manifest = Manifest.decode(self.read(keys.snapshot(head.snapshot)), MEMORY, head.snapshot)
        names = [name for pack in manifest.packs for name in (keys.pack(pack.id, pack.codec), keys.index(pack.id))]
        return head, manifest, {name[len(keys.prefix) :]: self.read(name) for name in names}

    def write(self, objects: Iterator[tuple[str, bytes]]) -> None:
        """Write many objects, near the server: by links, since signing them is all that boto3 is needed for."""
        pool = urllib3.PoolManager(maxsize=WRITERS, block=True)

        def put(one: tuple[str, bytes]) -> None:
            key, data = one
            link = self.server.client.generate_presigned_url(
                "put_object", Params={"Bucket": self.bucket, "Key": f"x/{key}"}
            )
            assert pool.request("PUT", link, body=data).status == 200

        with ThreadPoolExecutor(WRITERS) as threads:
            for done in threads.map(put, objects):
                assert done is None


@contextmanager
def scenes(folder: Path, delay: float = DELAY) -> Iterator[Callable[[str], Scene]]:
    """A server, and the same one far away: what makes scenes there, each with a bucket and a folder of that name."""
    with seaweedfs() as server, far_server(server.endpoint, delay) as far:
        before = dict(os.environ)
        os.environ.update(server.environment())

        def make(name: str) -> Scene:
            (folder / name).mkdir()
            return Scene(server, far, server.make_bucket(name), folder / name)

        try:
            yield make
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextmanager
def service(store: str, folder: Path) -> Iterator[tuple[httpx.Client, int]]:
    """A service in a process of its own: a client of it, and its process id."""
    words = [sys.executable, "-m", "sidecar", "serve", f"--store={store}", "--bind=127.0.0.1:8079"]
    environment = {**os.environ, "MEMORY_SIDECAR_TOKEN": TOKEN, "XDG_STATE_HOME": str(folder / "state")}
    process = subprocess.Popen(
        words, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, stderr=(folder / "service.log").open("ab")
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url="http://127.0.0.1:8079", headers=headers, timeout=300) as client:
            yield client, process.pid
    finally:
        process.terminate()
        process.wait(60)


def peak(pid: int) -> int:
    """Return the most resident memory a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def fill_memories(scene: Scene, count: int) -> None:
    """Copy the one memory so that there are ``count``: as this version stores memories with a "/" in their ids."""
    head, manifest, packs = scene.read_memory()

    def objects() -> Iterator[tuple[str, bytes]]:
        for number in range(1, count):
            name = f"team-{number % 10}/agent-{number}"
            folder = build_memory_key(name)
            yield MemoryKeys(f"{ROOT}{folder}/").head, SIGNPOST
            keys = MemoryKeys(f"{ROOT}{build_portable_folder(folder)}/")
            yield keys.head, replace(head, memory=name).encode()
            yield keys.snapshot(head.snapshot), replace(manifest, memory=name).encode()
            for rest, data in packs.items():
                yield keys.prefix + rest, data

    scene.write(objects())


def fill_snapshots(scene: Scene, count: int) -> None:
    """Give the one memory ``count`` more snapshots, older than those it has."""
    head, manifest, _ = scene.read_memory()
    keys, oldest = MemoryKeys.of(MEMORY), parse_snapshot_time(head.history[-1][0])

    def objects() -> Iterator[tuple[str, bytes]]:
        for number in range(1, count + 1):
            name = make_snapshot_id(oldest - timedelta(minutes=number))
            yield keys.snapshot(name), replace(manifest, snapshot=name).encode()

    scene.write(objects())


def timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def wait_until_idle(far: FarServer) -> None:
    """Wait until a service has looked at everything that it looks at when it starts."""
    seen = -1
    while sum("memories" in one.path for one in far.requests) != seen:
        seen = sum("memories" in one.path for one in far.requests)
        time.sleep(2)


def call(client: httpx.Client, what: str, home: Path) -> str:
    answer = client.post(f"/v1/memories/{MEMORY}/{what}", json={"sandbox": f"local:{home}"})
    answer.raise_for_status()
    return str(answer.json()["outcome"])


def warm_exports(scene: Scene, client: httpx.Client, home: Path, words: homes.Words, times: int) -> list[float]:
    """Return the seconds of warm exports through the service, one after each conversation."""
    took = []
    for _ in range(times):
        homes.converse(home, words)
        scene.far.forget()
        took.append(timed(lambda: call(client, "exports", home)))
    return took


def measure_one(section: Section, scene: Scene, database: int, times: int) -> None:
    """Warm exports of one memory, and a restore of it, through a service."""
    words = homes.Words(11, 4 << 20)
    home, fresh = scene.folder / "home", scene.folder / "fresh"
    homes.claude_mem(home, database, words)
    scene.export(home)
    with service(scene.url, scene.folder) as (client, _):
        warm_exports(scene, client, home, words, 3)
        took = warm_exports(scene, client, home, words, times)
        title = f"warm export, {size(database)}, through the service"
        section.add(title, f"{seconds(statistics.median(took))}, {seconds(min(took))} to {seconds(max(took))}")
        section.add("requests of it", f"{scene.far.count}, {scene.far.in_a_row} one after the other")
        scene.far.forget()
        unchanged = timed(lambda: call(client, "exports", home))
        section.add("nothing new", seconds(unchanged), f"{scene.far.count} requests")
        fresh.mkdir()
        scene.far.forget()
        restored = timed(lambda: call(client, "restores", fresh))
        section.add("restore", seconds(restored), f"{scene.far.count} requests")


def measure_many(section: Section, scene: Scene, count: int, idle: float) -> None:
    """A list of many memories, a page of them, and a service that has nothing to do."""
    homes.small_files(scene.folder / "home", 3, homes.Words(4, 1 << 20))
    scene.export(scene.folder / "home")
    fill_memories(scene, count)
    measure_listings(section, scene, count, idle)


def measure_listings(section: Section, scene: Scene, count: int, idle: float) -> None:
    temporary = scene.folder / "tmp"
    temporary.mkdir(exist_ok=True)
    scene.far.forget()
    took = timed(lambda: sidecar("list", store=scene.url, temporary=temporary))
    section.add(f"list of {count:,} memories, by command", seconds(took), f"{scene.far.count:,} requests")
    with service(scene.url, scene.folder) as (client, pid):
        wait_until_idle(scene.far)
        scene.far.forget()
        page = timed(lambda: client.get(f"/v1/memories?limit={PAGE}").raise_for_status())
        section.add(f"a page of {PAGE} of {count:,} memories", seconds(page), f"{scene.far.count} requests")
        after = client.get(f"/v1/memories?limit={PAGE}").json()["next"] or ""
        scene.far.forget()
        page = timed(lambda: client.get("/v1/memories", params={"limit": PAGE, "after": after}).raise_for_status())
        section.add("the page after it", seconds(page), f"{scene.far.count} requests")
        scene.far.forget()
        time.sleep(idle)
        section.add(f"an idle service with {count:,} memories", f"{scene.far.count} requests in {idle:.0f} s")
        section.add(f"peak RSS of the service with {count:,} memories", size(peak(pid)))


def measure_history(section: Section, scene: Scene, database: int, few: int, many: int, times: int) -> None:
    """Warm exports of a memory with few snapshots, and of the same one with many."""
    words = homes.Words(12, 4 << 20)
    home = scene.folder / "home"
    homes.claude_mem(home, database, words)
    scene.export(home)
    medians = []
    for count in (few, many):
        head, _, _ = scene.read_memory()
        fill_snapshots(scene, count - len(head.history))
        with service(scene.url, scene.folder) as (client, _):
            warm_exports(scene, client, home, words, 3)
            took = warm_exports(scene, client, home, words, times)
            medians.append(statistics.median(took))
            told = f"{seconds(medians[-1])}, {seconds(min(took))} to {seconds(max(took))}"
            ratio = f"{medians[-1] / medians[0]:.2f} ×, {scene.far.count} requests"
            section.add(f"warm export with {count:,} snapshots", told, ratio)


def measure(
    folder: Path, database: int, memories: Sequence[int], snapshots: int, times: int, *, idle: float = IDLE_SECONDS
) -> Section:
    """All of it: one memory of ``database`` bytes, so many ``memories``, and one with so many ``snapshots``."""
    section = Section(f"A store on S3 that is {DELAY * 1000:.0f} ms away")
    with scenes(folder) as make:
        measure_one(section, make("one"), database, times)
        for count in memories:
            measure_many(section, make(f"many-{count}"), count, idle)
        measure_history(section, make("history"), database, FEW, snapshots, times)
    return section
