"""Whatever is sent, the service answers as its OpenAPI document says, and never breaks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from sidecar.receipts import ExportOutcome, RestoreOutcome
from tests.parts.homes import PROJECT, claude_mem_home, empty_home, write
from tests.parts.services import TOKEN, Service, path, serving

NOWHERE = {"E2B_API_URL": "http://127.0.0.1:9", "DAYTONA_API_URL": "http://127.0.0.1:9", "HOME": "/nonexistent"}
"""No sandbox that a made-up reference names can be reached."""
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.parametrize(
    ("phases", "examples", "workers"),
    [
        ("examples,fuzzing", 3, 2),
        # One thread: the coverage phase parses sources in all of them, which CPython 3.11 sometimes fails at.
        pytest.param("examples,coverage,fuzzing", 60, 1, marks=pytest.mark.slow),
    ],
)
def test_every_answer_is_documented_and_none_is_a_failure_of_ours(
    tmp_path: Path, phases: str, examples: int, workers: int
) -> None:
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent", rows=5)
    with serving(tmp_path / "store", tmp_path / "log", {**NOWHERE, "TMPDIR": str(tmp_path)}) as service:
        for memory in ("conductor", "acme/agent-7"):  # the ids that the document gives as examples
            assert service.export(memory, f"local:{home}").status_code == 200
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json"),
                *("--header", f"Authorization: Bearer {TOKEN}", "--exclude-path", "/v1/events", "--checks", CHECKS),
                *("--phases", phases, "--max-examples", str(examples), "--suppress-health-check", "all"),
                *("--no-color", "--request-timeout", "60", "--workers", str(workers), "--generation-database", "none"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert "No issues found" in ran.stdout or "passed" in ran.stdout


def test_a_service_has_the_document_of_the_repository_for_anyone(tmp_path: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log") as service:
        served = httpx.get(f"{service.url}/openapi.json", trust_env=False).json()
    assert served == json.loads((PROJECT / "docs/openapi.json").read_text())


def _events_until(service: Service, kind: str) -> Iterator[dict[str, Any]]:
    with service.http.stream("GET", "/v1/events", headers={"Last-Event-ID": "0"}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                yield (event := json.loads(line.removeprefix("data: ")))
                if event["type"] == kind:
                    return


def test_what_is_told_as_it_happens_is_as_documented(tmp_path: Path) -> None:
    """Every outcome of exports and restores, for what their events hold depends on it; and what else is quickly had."""
    home, other, in_the_way = (empty_home(tmp_path / name) for name in ("home", "other", "in the way"))
    write(home / "MEMORY.md", b"# remembered\n" * 100)
    write(home / "memory/today.md", b"a day")
    write(in_the_way / "memory", b"a file where a folder has to be")
    review = '[review]\nrequired = ["reviewed"]\n'
    with serving(tmp_path / "store", tmp_path / "log", more=review) as service:
        document = service.http.get("/openapi.json").json()
        for word in ("declines", "acceptances"):
            box = empty_home(tmp_path / word)
            write(box / "MEMORY.md", f"# {word}\n".encode())
            assert service.export("reviewed", f"local:{box}").json()["outcome"] == "pending"
            assert service.http.post(path("reviewed", word), json={"because": "so"}).status_code == 200
        assert service.restore("me", f"local:{other}").json()["outcome"] == "empty"
        assert service.export("me", f"local:{home}").json()["outcome"] == "committed"
        assert service.export("me", f"local:{home}").json()["outcome"] == "unchanged"
        assert service.restore("me", f"local:{in_the_way}").json()["outcome"] == "incomplete"
        assert service.export("me", "local:/nowhere/at/all").status_code == 404
        write(other / "MEMORY.md", b"came with the sandbox")
        restored = service.restore("me", f"local:{other}").json()
        assert restored["outcome"] == "complete" and restored["set_aside"]
        write(home / "MEMORY.md", b"# went on\n" * 100)
        assert service.export("me", f"local:{home}").json()["outcome"] == "committed"
        write(other / "MEMORY.md", b"# went on elsewhere\n" * 100)
        assert service.export("me", f"local:{other}").json()["outcome"] == "diverged"
        (home / "MEMORY.md").unlink()
        (home / "memory/today.md").unlink()
        assert service.export("me", f"local:{home}").json()["outcome"] == "rejected"
        assert service.http.post(path("me", "acceptances"), json={}).status_code == 200
        assert service.http.put(path("me", "attachment"), json={"sandbox": f"local:{other}"}).status_code == 200
        assert service.http.delete(path("me", "attachment")).status_code == 200
        told = [*_events_until(service, "attachment.detached")]
    schema = {**document["components"]["schemas"]["Event"], "components": document["components"]}
    for event in told:
        jsonschema.validate(event, schema)
    outcomes = {f"export.{word}" for word in ExportOutcome} | {f"restore.{word}" for word in RestoreOutcome}
    assert outcomes | {
        "review.declined",
        "review.accepted",
        "export.failed",
        "guard.accepted",
        "attachment.attached",
        "attachment.detached",
    } <= {event["type"] for event in told}
