"""The OpenAPI document: what FastAPI finds out about the routes, and what generators of clients need besides.

Short operation ids; fields that are always sent are required in answers; what may be left out of a request has no
``default``, which some generators take for "always there"; enums for codes and types of events; the union of events.
"""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from sidecar import receipts
from sidecar.host.field_docs import read_field_docs
from sidecar.models import answers, records, requests
from sidecar.models.answers import Event, Problem, Restores
from sidecar.policy.limits import REASONS
from sidecar.service.api.codes import list_problem_codes, list_reason_codes
from sidecar.service.api.examples import add_examples
from sidecar.service.api.problems import document_problems
from sidecar.service.event_details import DETAILS

REF = "#/components/schemas/{model}"
Json = dict[str, Any]
MODELS: dict[str, type[Any]] = {
    name: kind
    for module in (receipts, requests, answers, records)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and is_dataclass(kind)
}


def name_operation(route: APIRoute) -> str:
    """Return the id of an operation: the name of its function, as JavaScript would write it."""
    first, *rest = route.name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def build_openapi(app: FastAPI) -> Json:
    """Return the OpenAPI document. It is built once."""
    if not app.openapi_schema:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        schemas = document["components"]["schemas"]
        _add_schemas(schemas)
        for name, schema in schemas.items():
            _complete_schema(schema, MODELS.get(name))
        _add_codes(schemas)
        add_examples(schemas)
        _add_refusals_of_content(document)
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
        app.openapi_schema = document
    return app.openapi_schema


def _add_schemas(schemas: Json) -> None:
    """Add the schemas that no route names by a type: problems, the events of the stream, and what came of several
    restores."""
    kinds = [Problem, Event, Restores, *DETAILS]
    made, others = TypeAdapter.json_schemas(
        [(kind, "serialization", TypeAdapter(kind)) for kind in kinds], ref_template=REF
    )
    for name, schema in others.get("$defs", {}).items():
        schemas.setdefault(name, schema)
    schemas.setdefault(Restores.__name__, made[Restores, "serialization"])
    event = schemas.pop(Event.__name__)
    _complete_schema(event, Event)
    union = []
    for details, types in DETAILS.items():
        name = f"{details.__name__.removesuffix('Details')}Event"
        own = {"type": {"type": "string", "enum": list(types)}, "details": made[details, "serialization"]}
        schemas[name] = {
            **event,
            "title": name,
            "description": inspect.getdoc(details),
            "properties": {**event["properties"], **own},
        }
        union.append({"$ref": REF.format(model=name)})
    schemas[Event.__name__] = {"title": Event.__name__, "description": "Something that happened.", "oneOf": union}


def _complete_schema(schema: Json, kind: type[Any] | None) -> None:
    """Add descriptions, and what is required in an answer; remove defaults, and titles that repeat a field's name."""
    about = read_field_docs(kind) if kind is not None else {}
    for name, field in schema.get("properties", {}).items():
        field.pop("title", None)
        field.pop("default", None)
        if said := about.get(name) or about.get(f"{name}_"):  # "from_" is sent as "from"
            field["description"] = said.replace("``", "`")
    if "description" in schema:
        schema["description"] = schema["description"].replace("``", "`")
    if "properties" in schema and kind is not None and not issubclass(kind, requests.Body):
        schema["required"] = list(schema["properties"])


def _add_codes(schemas: Json) -> None:
    """Add the enums that models cannot have, being below the rooms that know the codes."""
    for name, codes, where in (
        ("ProblemCode", list_problem_codes(), ("Problem", "ErrorDetails")),
        ("ReasonCode", list_reason_codes(), ("Reason",)),
    ):
        schemas[name] = {"title": name, "type": "string", "enum": codes}
        for place in where:
            schemas[place]["properties"]["code"] = {"$ref": REF.format(model=name)}
    schemas["ExportBody"]["properties"]["allow"]["items"]["enum"] = list(REASONS)


def _add_refusals_of_content(document: Json) -> None:
    """Add to every route that takes JSON that it refuses other content."""
    for operations in document["paths"].values():
        for operation in operations.values():
            if "application/json" in operation.get("requestBody", {}).get("content", {}):
                operation["responses"]["415"] = document_problems(415)[415]
