"""Export and restore over HTTP, and the state of their operations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse

from sidecar.engine import ExportRequest, RestoreRequest
from sidecar.errors import AccessDenied, UsageError
from sidecar.models.answers import ExportOperation, Problem, RestoreOperation, Restores, SandboxRestore
from sidecar.models.requests import AttachBody, ExportBody, RestoreBody, StartBody
from sidecar.receipts import ExportReceipt, RestoreReceipt
from sidecar.service.access.grants import Caller, Verb
from sidecar.service.access.visibility import HIDDEN, may_see_operation, veil_receipt, veil_restore
from sidecar.service.api.access import Scope, get_caller, needs
from sidecar.service.api.paths import MemoryId
from sidecar.service.api.problems import build_answer, build_problem, document_problems
from sidecar.service.attachments.attachment import CareOptions
from sidecar.service.core import Sidecar
from sidecar.service.operations import Operation, Receipt
from sidecar.service.restores import GroupRequest, RestoreGroup, SandboxResult
from sidecar.service.sandboxes import SandboxTarget

router = APIRouter(prefix="/v1", tags=["verbs"])

IdempotencyKey = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        max_length=255,
        description="Repeat a call safely: under one key it is done once, also across a restart.",
    ),
]
Wait = Annotated[bool, Query(description="false: answer 202 at once, and tell the progress at /v1/operations/{id}.")]
ACCEPTED: dict[int | str, dict[str, Any]] = {
    # Without the type of its body, which a GET of the operation has: with it, generators would make the answer of
    # every export a union of a receipt and an operation, also for callers that wait.
    202: {
        "description": "Accepted, with `wait` false. The body is the operation; `Location` is where to ask for it again.",
        "headers": {"Location": {"description": "The operation's address.", "schema": {"type": "string"}}},
    }
}
SEVERAL: dict[int | str, dict[str, Any]] = {
    # Without the type of its body too.
    207: {
        "description": "What came of each of several `sandboxes`, as in the schema `Restores`: look whether it is"
        " `complete`. A call without `sandboxes` never gets this."
    }
}
TROUBLE = document_problems(400, 404, 409, 410, 413, 422, 424, 429, 503, 507)
SAME_FIELDS = {entry.name for entry in fields(ExportOperation)} - {"problem"}
"""What an operation has under the same name as the answer about it."""


def get_sidecar(request: Request) -> Sidecar:
    """Return the service of the application."""
    sidecar: Sidecar = request.app.state.sidecar
    return sidecar


def build_care(body: RestoreBody | AttachBody | StartBody, caller: Caller, *, lasting: bool = False) -> CareOptions:
    """Take from a body how its sandbox is to be looked after, and note for whom."""
    return CareOptions(
        layouts=body.layouts,
        projects=body.projects,
        checkpoint_every=body.checkpoint_every,
        conversation=body.conversation,
        user=body.user,
        by=caller.name if caller.id else "",
        lasting=lasting,
    )


@router.post(
    "/memories/{memory}/exports",
    response_model=ExportReceipt,
    responses={**ACCEPTED, **TROUBLE},
)
@needs(Verb.EXPORT)
async def export_memory(
    request: Request, memory: MemoryId, body: ExportBody, key: IdempotencyKey = "", wait: Wait = True
) -> Any:
    """Export a sandbox's memory as a new snapshot. The receipt's ``outcome`` says what came of it."""
    caller = get_caller(request)
    if body.force or body.allow:
        caller.require(Verb.CHANGE, memory, "override a guard")
    wanted = ExportRequest(
        memory=memory,
        layouts=tuple(body.layouts),
        projects=None if body.projects is None else tuple(body.projects),
        conversation=body.conversation,
        label=body.label,
        force=body.force,
        allow=tuple(body.allow),
    )
    target = SandboxTarget(body.sandbox, body.wake, body.user)
    operation = await get_sidecar(request).start_export(wanted, target, key=key, caller=caller)
    return await build_result_answer(request, operation, wait=wait)


@router.post(
    "/memories/{memory}/restores",
    response_model=RestoreReceipt,
    responses={**ACCEPTED, **SEVERAL, **TROUBLE},
)
@needs(Verb.RESTORE)
async def restore_memory(
    request: Request, memory: MemoryId, body: RestoreBody, key: IdempotencyKey = "", wait: Wait = True
) -> Any:
    """Restore a memory into a sandbox. ``empty`` is a first start; ``incomplete`` leaves the sandbox as it was.

    It opens a conversation, which the next export closes: in between the sandbox is exported now and then, before its provider
    ends it, and when the service stops. Not with ``attach`` false, mode ``seed`` or a snapshot that is not the head."""
    caller = get_caller(request)
    if body.force or body.discard:
        caller.require(Verb.CHANGE, memory, "restore by force, or discard what is unsaved")
    if body.brief:
        caller.require(Verb.READ, memory, "have a brief in the answer")
    wanted = RestoreRequest(
        memory=memory,
        snapshot=body.snapshot,
        mode=body.mode,
        projects=None if body.projects is None else tuple(body.projects),
        force=body.force,
        withhold_projects=body.withhold_projects,
        must_exist=body.must_exist,
        conversation=body.conversation,
        discard=body.discard,
        read_only=body.read_only or bool(body.only),
        label=body.label,
        only=tuple(body.only),
        brief=body.brief.tokens if body.brief else 0,
        brief_path=body.brief.path if body.brief else "",
    )
    # A conversation is exported at checkpoints, so whoever may not export opens none.
    care = build_care(body, caller) if body.attach and caller.may([Verb.EXPORT], memory) else None
    if body.sandboxes is None and body.sandbox is not None:
        target = SandboxTarget(body.sandbox, body.wake, body.user)
        operation = await get_sidecar(request).start_restore(wanted, target, key=key, care=care, caller=caller)
        return await build_result_answer(request, operation, wait=wait)
    if body.sandboxes is None or body.sandbox is not None:
        raise UsageError("Either `sandbox` or `sandboxes` is needed.", hint="Name one sandbox, or a list of them.")
    if not wait:
        raise UsageError(
            "With several sandboxes the call waits.", hint="Repeat it under its Idempotency-Key if it is cut."
        )
    targets = tuple(SandboxTarget(ref, body.wake, body.user) for ref in body.sandboxes)
    asked = GroupRequest(restore=wanted, targets=targets, caller=caller, care=care, key=key)
    return build_group_answer(request, memory, await RestoreGroup(get_sidecar(request), asked).run())


@router.get("/operations/{id}", responses=document_problems(404, 422))
@needs(Verb.READ, Verb.EXPORT, Verb.RESTORE, scope=Scope.SEEN)
async def get_operation(request: Request, id: str) -> ExportOperation | RestoreOperation:
    """How an export or a restore stands; with its receipt, or what it failed with, once it has ended."""
    operation, caller = get_sidecar(request).operations.find(id), get_caller(request)
    if operation is None or not may_see_operation(caller, operation):
        hint = "The last thousand are remembered, and none from before a restart."
        problem = Problem(
            status=404, title="Not found", detail="There is no such operation.", code="not-found", hint=hint
        )
        return build_answer(problem)  # type: ignore[return-value]  # FastAPI sends a response as it is
    return _build_operation_answer(caller, operation)


async def build_result_answer(request: Request, operation: Operation, *, wait: bool) -> Response | Receipt:
    """Return the receipt of an operation that the caller asked for; if it does not wait, the answer 202 at once."""
    caller = get_caller(request)
    if wait:
        return veil_receipt(caller, await operation.result())
    where = f"/v1/operations/{operation.id}"
    return JSONResponse(asdict(_build_operation_answer(caller, operation)), 202, headers={"Location": where})


def build_group_answer(request: Request, memory: str, results: Sequence[SandboxResult]) -> Response:
    """Return what came of each sandbox. If the caller may not use one of them, the gate is told of the refusal."""
    caller, rows = get_caller(request), []
    for result in results:
        receipt = veil_restore(caller, result.receipt) if result.receipt is not None else None
        problem = build_problem(result.problem) if result.problem is not None else None
        rows.append(SandboxRestore(sandbox=result.sandbox, receipt=receipt, problem=problem))
    request.state.refused = any(isinstance(result.problem, AccessDenied) for result in results)
    answer = Restores(memory=memory, complete=all(row.is_in_place for row in rows), sandboxes=rows)
    # In ASCII, as all answers: names of files need not be text.
    return Response(json.dumps(asdict(answer)).encode("ascii"), 207, media_type="application/json")


def _build_operation_answer(caller: Caller, operation: Operation) -> ExportOperation | RestoreOperation:
    own = operation.caller.id == caller.id
    said: dict[str, Any] = {name: getattr(operation, name) for name in SAME_FIELDS}
    problem = build_problem(operation.problem) if operation.problem else None
    if problem is not None and not own and caller.restricted:
        problem = replace(problem, detail=HIDDEN)
    said["problem"] = problem
    said["receipt"] = veil_receipt(caller, operation.receipt, own=own) if operation.receipt else None
    return ExportOperation(**said) if operation.kind == "export" else RestoreOperation(**said)
