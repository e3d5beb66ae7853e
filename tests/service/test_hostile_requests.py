"""Whatever is sent, byte by byte: no failure of ours, no traceback, and the next caller is served."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.parts.homes import claude_mem_home, empty_home
from tests.parts.hostile_requests import Hostile, hostile_requests
from tests.parts.raw import Answer, receive
from tests.parts.services import TOKEN, Service, path, serving

pytestmark = pytest.mark.usefixtures("forked_programs")

NOWHERE = {"E2B_API_URL": "http://127.0.0.1:9", "DAYTONA_API_URL": "http://127.0.0.1:9"}
AT_ONCE = 8
BATCH = 400


def sent(service: Service, hostile: Hostile) -> Answer:
    with socket.create_connection(("127.0.0.1", service.port), 30) as connection:
        with suppress(ConnectionError):
            for part in hostile.parts:
                connection.sendall(part)
                if len(hostile.parts) > 1:
                    time.sleep(0.05)
        return Answer(0, {}, b"") if hostile.hang_up else receive(connection)


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 400), *(pytest.param(seed, 2500, marks=pytest.mark.slow) for seed in (2, 3, 4, 5))]
)
def test_no_request_breaks_the_service(tmp_path: Path, seed: int, count: int) -> None:
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent", rows=3)
    quick: dict[str, Any] = {"header_timeout": 1, "body_timeout": 1, "body_bytes": 200_000}
    with serving(tmp_path / "store", tmp_path / "log", {**NOWHERE, "TMPDIR": str(tmp_path)}, **quick) as service:
        assert service.export("kept", f"local:{home}").status_code == 200
        statuses: dict[int, int] = {}
        requests = list(hostile_requests(seed, count, TOKEN, str(tmp_path / "scratch")))
        for start in range(0, count, BATCH):
            batch = requests[start : start + BATCH]
            with ThreadPoolExecutor(AT_ONCE) as callers:
                answers = list(callers.map(lambda hostile: sent(service, hostile), batch))
            for number, (hostile, answer) in enumerate(zip(batch, answers, strict=True), start):
                statuses[answer.status] = statuses.get(answer.status, 0) + 1
                assert answer.status < 500, (seed, number, hostile.parts[0][:500], answer.body[:500])
                if answer.status >= 400:
                    assert answer.headers["content-type"] == "application/problem+json", (seed, number, hostile.parts)
                if answer.status:
                    assert answer.headers["x-content-type-options"] == "nosniff", (seed, number, hostile.parts)
            assert httpx.get(f"{service.url}/readyz", timeout=5).status_code == 200
        assert "Traceback" not in service.log.read_text()
        # The requests were of all kinds, and what was there before still is.
        assert {200, 400, 401, 404, 405, 415, 421, 422} <= set(statuses), statuses
        assert service.http.get(path("kept", "snapshots", "latest")).status_code == 200
        assert service.export("kept", f"local:{home}").json()["outcome"] == "unchanged"
        assert service.log.stat().st_size < 1_000_000
