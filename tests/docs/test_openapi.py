"""The OpenAPI document, as generators of clients read it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema

from docs.generate import error_classes, has_own_code
from sidecar.models import requests
from sidecar.receipts import ExportOutcome, RestoreOutcome
from sidecar.service.event_types import EVENTS
from tests.parts.homes import PROJECT

PAGE = PROJECT / "docs/openapi.json"
DOCUMENT = json.loads(PAGE.read_text())
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
BODIES = {name for name in SCHEMAS if issubclass(getattr(requests, name, object), requests.Body)}
SAID_WHERE_IT_APPLIES = {"ExportDetails", "RestoreDetails", "AcceptanceDetails"}
"""Of these, some fields are only there where they say something."""


def _operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for place, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            yield f"{method} {place}", operation


def test_every_operation_has_a_short_name_of_its_own() -> None:
    names = [operation["operationId"] for _, operation in _operations()]
    assert len(set(names)) == len(names) > 20
    assert [name for name in names if not re.fullmatch(r"[a-z]{3,10}([A-Z][a-z]+)", name)] == []
    assert {"exportMemory", "restoreMemory", "listMemories"} <= set(names)


def test_an_answer_requires_what_is_always_sent_and_a_request_only_what_has_no_default() -> None:
    answers = {name: schema for name, schema in SCHEMAS.items() if "properties" in schema and name not in BODIES}
    assert len(answers) > 40 and len(BODIES) == 11
    for name, schema in answers.items():
        if name not in SAID_WHERE_IT_APPLIES:
            assert schema.get("required", []) == list(schema["properties"]), name
    required = {name: SCHEMAS[name].get("required", []) for name in BODIES}
    assert required == {
        "BriefBody": [],
        "ExportBody": ["sandbox"],
        "RestoreBody": [],
        "AttachBody": ["sandbox"],
        "MoveBody": ["to"],
        "StartBody": ["on"],
        "ForkBody": ["memory"],
        "RollbackBody": ["snapshot"],
        "AcceptBody": [],
        "DeclineBody": [],
        "ForgetBody": [],
    }
    fields = [field for schema in SCHEMAS.values() for field in schema.get("properties", {}).values()]
    # Some generators take a field that has a default for one that is always there.
    assert [field for field in fields if "default" in field] == []


def test_words_that_programs_compare_are_enums() -> None:
    def words(schema: str, field: str) -> set[str]:
        found = SCHEMAS[schema]["properties"][field]
        return set(SCHEMAS[found["$ref"].rpartition("/")[2]]["enum"] if "$ref" in found else found["enum"])

    assert words("ExportReceipt", "outcome") == set(ExportOutcome)
    assert words("RestoreReceipt", "outcome") == set(RestoreOutcome)
    assert words("Attachment", "state") == {"open", "idle", "lost", "ended"}
    assert words("ExportOperation", "state") == {"queued", "running", "done", "failed"}
    assert words("Snapshot", "standing") == {
        *("head", "earlier head", "diverged", "rejected", "pending", "accepted", "declined", "damaged"),
    }
    assert {"observation", "section"} < words("Hit", "kind")
    ours = {kind.code for kind in error_classes() if has_own_code(kind) and _is_of_service(kind)}
    assert ours | {"unauthorized", "disk-full", "limit-bytes"} <= words("Problem", "code")
    assert {"shrunk", "diverged", "read-only", "in-the-way"} <= words("Reason", "code")
    assert not {"no-service", "not-saved"} & words("Problem", "code"), "the command line's and the client's own"


def _is_of_service(kind: type) -> bool:
    return not kind.__module__.startswith(("sidecar.cli", "sidecar.client"))


def test_the_stream_of_events_is_a_union_with_every_type_once() -> None:
    stream = DOCUMENT["paths"]["/v1/events"]["get"]["responses"]["200"]["content"]["text/event-stream"]
    assert stream["schema"] == {"$ref": "#/components/schemas/Event"}
    members = [SCHEMAS[one["$ref"].rpartition("/")[2]] for one in SCHEMAS["Event"]["oneOf"]]
    types = [kind for member in members for kind in member["properties"]["type"]["enum"]]
    assert sorted(types) == sorted(EVENTS)


def test_every_error_is_a_problem_and_every_field_of_a_request_is_explained() -> None:
    for name, operation in _operations():
        for status, answer in operation["responses"].items():
            if int(status) >= 400 and name != "get /readyz":
                assert answer["content"] == {
                    "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
                }
    assert [
        (body, field)
        for body in BODIES
        for field, schema in SCHEMAS[body]["properties"].items()
        if "description" not in schema
    ] == []


def test_everything_that_is_sent_or_answered_has_an_example_that_fits() -> None:
    used = {
        reference
        for _, operation in _operations()
        for part in [operation.get("requestBody", {}), *operation["responses"].values()]
        for kind, content in part.get("content", {}).items()
        if kind.endswith(("json", "event-stream"))
        for reference in re.findall(r"schemas/(\w+)", json.dumps(content))
    }
    assert len(used) > 25
    for name in used:
        (example,) = SCHEMAS[name]["examples"]
        jsonschema.validate(example, {**SCHEMAS[name], "components": DOCUMENT["components"]})
