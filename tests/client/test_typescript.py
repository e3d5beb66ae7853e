"""Types for TypeScript, made from the OpenAPI document by the generator that people take, with its default settings."""

from __future__ import annotations

import re
from pathlib import Path

from tests.parts.homes import PROJECT
from tests.parts.typescript import find_type_errors, generate_types

SETUP = "declare const url: string, token: string;\n"
WRONG = """
import createClient from "openapi-fetch";
import type { components, paths } from "./memory-sidecar";
const sidecar = createClient<paths>({ baseUrl: url });
const memory = { params: { path: { memory: "m" } } };

// @ts-expect-error: there is no sandbox
await sidecar.POST("/v1/memories/{memory}/exports", { ...memory, body: { conversation: "c1" } });
// @ts-expect-error: no such field
const body: components["schemas"]["RestoreBody"] = { sandbox: "s", colour: "red" };
// @ts-expect-error: no such outcome
const outcome: components["schemas"]["ExportReceipt"]["outcome"] = "lost";
// @ts-expect-error: no such code
const code: components["schemas"]["Problem"]["code"] = "sandbox-gnoe";
"""
NARROWED = """
import type { components } from "./memory-sidecar";

export function tell(event: components["schemas"]["Event"]): string {
  if (event.type === "sandbox.lost") return `${event.memory}: ${event.details.unsaved_seconds.toFixed()} seconds`;
  if (event.type === "export.rejected" || event.type === "export.committed") return String(event.details.saved);
  return event.type === "restore.failed" ? event.details.error.code : "";
}

export function look(operation: components["schemas"]["ExportOperation"] | components["schemas"]["RestoreOperation"]) {
  return operation.kind === "export" ? operation.receipt?.head : operation.receipt?.kept;
}
"""


def test_the_typescript_on_the_page_compiles_with_types_made_from_the_document(tmp_path: Path) -> None:
    section = (PROJECT / "docs/conductor.md").read_text().partition("## TypeScript")[2].partition("\n## ")[0]
    shown = re.findall(r"```ts\n(.*?)```", section, re.DOTALL)
    assert len(shown) == 2
    generate_types(PROJECT / "docs/openapi.json", tmp_path / "memory-sidecar.d.ts")
    for number, program in enumerate([*shown, WRONG, NARROWED]):
        (tmp_path / f"program{number}.ts").write_text(SETUP + program)
    assert find_type_errors(tmp_path) == []
