"""Whatever is sent, the service answers as its OpenAPI document says, and never breaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from tests.parts.homes import claude_mem_home, empty_home
from tests.parts.services import TOKEN, serving

NOWHERE = {"E2B_API_URL": "http://127.0.0.1:9", "DAYTONA_API_URL": "http://127.0.0.1:9", "HOME": "/nonexistent"}
"""No sandbox that a made-up reference names can be reached."""
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.parametrize(
    ("phases", "examples"),
    [("examples,fuzzing", 3), pytest.param("examples,coverage,fuzzing", 60, marks=pytest.mark.slow)],
)
def test_every_answer_is_documented_and_none_is_a_failure_of_ours(tmp_path: Path, phases: str, examples: int) -> None:
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent", rows=5)
    with serving(tmp_path / "store", tmp_path / "log", NOWHERE) as service:
        for memory in ("conductor", "acme/agent-7"):  # the ids that the document gives as examples
            assert service.export(memory, f"local:{home}").status_code == 200
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json"),
                *("--header", f"Authorization: Bearer {TOKEN}", "--exclude-path", "/v1/events", "--checks", CHECKS),
                *("--phases", phases, "--max-examples", str(examples), "--suppress-health-check", "all"),
                *("--no-color", "--request-timeout", "60", "--workers", "2", "--generation-database", "none"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert "No issues found" in ran.stdout or "passed" in ran.stdout


def test_everything_that_is_sent_or_answered_has_an_example_that_fits(tmp_path: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log") as service:
        document = service.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    used = {
        content["schema"]["$ref"].rpartition("/")[2]
        for operations in document["paths"].values()
        for operation in operations.values()
        for part in [operation.get("requestBody", {}), *operation["responses"].values()]
        for kind, content in part.get("content", {}).items()
        if kind.endswith("json")
    }
    assert len(used) > 15
    for name in used:
        (example,) = schemas[name]["examples"]
        jsonschema.validate(example, {**schemas[name], "components": document["components"]})
