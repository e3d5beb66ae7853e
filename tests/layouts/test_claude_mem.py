"""claude-mem's queue, which is in its worker's head alone, and its database, which an older plugin would spoil."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.sandboxes.local import LocalSandbox
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.core import Timing
from sidecar.program.capture.versions import parse_version
from sidecar.program.worker.holders import find_holders
from tests.parts.claude_mem import Worker, free_port
from tests.parts.homes import claude_mem_home, empty_home, engine_at, titles, tree, write

BUSY = """
import http.server, json, pathlib, sqlite3, sys
database, port, after = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rows = sqlite3.connect(database, isolation_level=None)
asked = 0
class Desk(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        pathlib.Path(database).parents[1].joinpath("asked").write_text(str(asked))
        if asked == after:
            rows.execute("INSERT INTO observations(title, narrative) VALUES ('from the queue', 'x')")
        body = json.dumps({"isProcessing": asked < after, "queueDepth": max(0, after - asked)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
desk = http.server.HTTPServer(("127.0.0.1", port), Desk)
print("ready", flush=True)
desk.serve_forever()
"""
"""A worker with the database open that writes what is in its queue when it is asked for the so-many-th time."""

PLUGIN = ".claude/plugins/cache/thedotmack/claude-mem/{version}/package.json"


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_at(tmp_path / "store")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return claude_mem_home(tmp_path / "home", rows=20)


class Busy:
    def __init__(self, home: Path, after: int) -> None:
        port = free_port()
        settings = home / ".claude-mem/settings.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "CLAUDE_MEM_WORKER_PORT": str(port)}))
        command = [sys.executable, "-c", BUSY, str(home / ".claude-mem/claude-mem.db"), str(port), str(after)]
        self.database = command[3]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None and self.process.stdout.readline() == b"ready\n"


@pytest.fixture
def started() -> Iterator[list[Busy]]:
    running: list[Busy] = []
    yield running
    for busy in running:
        busy.process.kill()
        busy.process.communicate()
        for again in find_holders([busy.database]):
            os.kill(again.pid, signal.SIGKILL)


async def test_an_export_waits_for_what_the_worker_has_yet_to_write(
    engine: Engine, home: Path, tmp_path: Path, started: list[Busy]
) -> None:
    started.append(Busy(home, after=4))
    receipt = await export(engine, LocalSandbox(home), ExportRequest(memory="m"))
    assert receipt.outcome == "committed" and not any("to write" in warning for warning in receipt.warnings)
    other = empty_home(tmp_path / "other")
    await restore(engine, LocalSandbox(other), RestoreRequest(memory="m"))
    assert titles(other)[-1] == "from the queue"


async def test_a_worker_that_does_not_get_done_is_waited_for_only_so_long_and_it_is_said(
    engine: Engine, home: Path, started: list[Busy]
) -> None:
    started.append(Busy(home, after=10**9))
    begun = time.monotonic()
    quick = replace(engine, timing=Timing(worker_wait=0.3))
    receipt = await export(quick, LocalSandbox(home), ExportRequest(memory="m"))
    assert time.monotonic() - begun < 60
    assert receipt.outcome == "committed"
    assert any("things to write after 0.3 s" in warning for warning in receipt.warnings)


@pytest.mark.parametrize(("after", "told"), [(4, 0), (10**9, 1)])
async def test_a_restore_lets_the_worker_get_done_before_it_stops_it(
    after: int, told: int, engine: Engine, home: Path, tmp_path: Path, started: list[Busy]
) -> None:
    await export(engine, LocalSandbox(home), ExportRequest(memory="m"))
    other = claude_mem_home(tmp_path / "other", rows=3)
    started.append(Busy(other, after))
    quick = replace(engine, timing=Timing(worker_wait=5.0 if told == 0 else 0.3))
    receipt = await restore(quick, LocalSandbox(other), RestoreRequest(memory="m"))
    assert (receipt.outcome, len(titles(other))) == ("complete", 20)
    assert sum("things to write after 0.3 s: it was stopped" in warning for warning in receipt.warnings) == told
    assert int((other / "asked").read_text()) >= 2


def test_a_real_worker_says_how_much_it_has_to_do(tmp_path: Path) -> None:
    """The path and the key that the layout names are those of the real program."""
    from sidecar.layouts import load_built_in

    rule = load_built_in()["claude-mem"].worker
    assert rule is not None
    with Worker(tmp_path / "home") as worker:
        assert worker._call("GET", rule.busy_path)[rule.busy_key] == 0


def install(home: Path, version: str) -> None:
    write(home / PLUGIN.format(version=version), json.dumps({"name": "x", "version": version}).encode())


async def test_an_older_plugin_gets_no_newer_database(engine: Engine, home: Path, tmp_path: Path) -> None:
    install(home, "13.4.0")
    install(home, "13.25.3")
    sent = await export(engine, LocalSandbox(home), ExportRequest(memory="m"))
    manifest = await engine.repository.manifest("m", sent.snapshot or "")
    assert manifest.versions == {"claude-mem": "13.25.3"}
    other = claude_mem_home(tmp_path / "other", rows=3)
    install(other, "13.4.0")
    before = {name: about for name, about in tree(other).items() if not name.startswith(b".cache")}
    refused = await restore(engine, LocalSandbox(other), RestoreRequest(memory="m"))
    assert refused.outcome == "incomplete" and refused.reason is not None
    assert (refused.reason.code, "13.25.3; here is 13.4.0" in refused.reason.message) == ("plugin-older", True)
    assert {name: about for name, about in tree(other).items() if not name.startswith(b".cache")} == before
    forced = await restore(engine, LocalSandbox(other), RestoreRequest(memory="m", force=True))
    assert (forced.outcome, len(titles(other))) == ("complete", 20)


@pytest.mark.parametrize("version", ["13.25.3", "13.26.0", "14.0.0-beta.1", ""])
async def test_a_plugin_as_new_or_one_nobody_sees_gets_it(
    version: str, engine: Engine, home: Path, tmp_path: Path
) -> None:
    install(home, "13.25.3")
    await export(engine, LocalSandbox(home), ExportRequest(memory="m"))
    other = empty_home(tmp_path / "other")
    if version:
        install(other, version)
    assert (await restore(engine, LocalSandbox(other), RestoreRequest(memory="m"))).outcome == "complete"


@pytest.mark.parametrize(("here", "told"), [(20, 1), (52, 0), (53, 0)])
async def test_where_versions_are_not_to_be_seen_an_older_schema_is_told(
    here: int, told: int, engine: Engine, home: Path, tmp_path: Path
) -> None:
    other = claude_mem_home(tmp_path / "other", rows=3)
    install(other, "10.6.3")
    for place, schema in ((home, 52), (other, here)):
        with sqlite3.connect(place / ".claude-mem/claude-mem.db") as database:
            database.execute("DELETE FROM schema_versions")
            database.execute("INSERT INTO schema_versions (version) VALUES (?)", (schema,))
        database.close()
    await export(engine, LocalSandbox(home), ExportRequest(memory="m"))
    receipt = await restore(engine, LocalSandbox(other), RestoreRequest(memory="m"))
    assert (receipt.outcome, len(titles(other))) == ("complete", 20)
    assert sum("has schema 52; the one that was here had 20" in words for words in receipt.warnings) == told


def test_versions_are_compared_as_numbers() -> None:
    versions = ["9.1.0", "10.0.0-beta.2", "10.0.0", "10.0.1", "13.4.0", "13.25.3"]
    assert all(parse_version(older) < parse_version(newer) for older, newer in itertools.pairwise(versions))
