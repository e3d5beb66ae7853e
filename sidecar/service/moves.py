"""Move a memory to another sandbox: export, create elsewhere, restore, and only then let the old sandbox go.

The new sandbox has a record as in ``starts``, which also names the old one. As long as the old one lives and is attached,
it is the one that counts: whatever fails, and whoever dies, the new one is ended. When the old one is gone, or was let go, the
new one stays.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, field, replace
from typing import Any

import msgspec
import structlog

from sidecar.engine import RestoreRequest
from sidecar.errors import NotMoved, SandboxNotAllowed, SidecarError
from sidecar.host.values import dataclass
from sidecar.ids import build_start_key
from sidecar.models.answers import Attached, Moved
from sidecar.receipts import ExportOutcome, ExportReceipt
from sidecar.service.attachments.attachment import ENDED, LOST, Attachment, CareOptions, NotAttached
from sidecar.service.attachments.checkpoints import CHECKPOINT
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.idempotency import KeyedCall
from sidecar.service.starts import HeldRecord, StartRequest, Starts, compute_digest

ROUNDS = 3
"""How often what was written in the old sandbox meanwhile is brought into the new one."""
DETACHED = "detached"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequest:
    """What a caller wants: which sandbox is left, and where the new one is."""

    memory: str
    provider: str
    template: str
    sandbox: str = ""
    keep_old: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    timeout: float | None = None
    user: str = ""

    def as_body(self) -> dict[str, Any]:
        """Return it as it is compared with other calls under the same key."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


class Moves:
    """Moves memories from one sandbox to another."""

    def __init__(self, starts: Starts, keeper: Keeper, sidecar: Sidecar) -> None:
        self._starts, self._keeper, self._sidecar = starts, keeper, sidecar
        self._log = structlog.get_logger("sidecar")

    async def move(self, request: MoveRequest, key: str = "") -> Moved:
        """Move a memory to a new sandbox. Under one key it is done once.

        Raise ``NotMoved`` if what the old sandbox has is not saved, and any other ``SidecarError`` if a step failed. The
        old sandbox is as it was then, and looked after.
        """
        await self._starts.check(request.memory, request.provider)
        body = request.as_body()
        asked = KeyedCall(key, request.memory, "move", body) if key else None
        place = build_start_key(request.memory, f"move {key or secrets.token_hex(20)}")
        digest = compute_digest(body)
        return await self._starts.run_once(place, digest, lambda: self._move_once(request, place, digest, asked))

    async def _move_once(self, request: MoveRequest, place: str, digest: str, asked: KeyedCall | None) -> Moved:
        remembered = self._sidecar.remembered_calls
        if asked is not None and (call := await remembered.find(asked)) is not None and call.receipt is not None:
            return msgspec.convert(call.receipt, Moved)
        before = await self._starts.read(place)
        if before is not None and before.record.moving:
            old = await self._starts.find_living(request.memory, before.record.moving)
            former = before.record.moving
        else:
            old = await self._keeper.find(request.memory, request.sandbox)
            former = old.sandbox
            if old.state in (LOST, ENDED):
                raise NotAttached(f"{former} is {old.state}.", hint="`memory-sidecar start` creates a new one.")
            if not request.keep_old:
                self._check_end(former)  # before a sandbox is made that could not take its place
        exported = await self._save(old) if old is not None else None
        wanted = _build_start(request, old)
        held, again = await self._starts.claim(wanted, place, digest, former)
        if old is None:
            return await self._finish_interrupted(wanted, held, former, asked)
        try:
            held = await self._starts.create(wanted, held, again=again)
            answer = await self._starts.restore_and_attach(wanted, held.record.sandbox)
            answer, exported = await self._catch_up(wanted, old, answer, exported)
            await self._let_go(old, keep=request.keep_old)
        except SidecarError as problem:
            await self._starts.undo_and_say(held, problem)
            problem.message += f" {old.sandbox} is looked after as before."
            raise
        moved = Moved(
            attachment=answer.attachment,
            restored=answer.restored,
            exported=exported,
            former=former,
            former_state=DETACHED if request.keep_old else ENDED,
        )
        return await self._finish(moved, held, asked, again=again)

    async def _finish_interrupted(
        self, wanted: StartRequest, held: HeldRecord, former: str, asked: KeyedCall | None
    ) -> Moved:
        """Answer a call whose service died after the old sandbox was let go: the new one is there, and has it."""
        ref = held.record.sandbox
        if not ref or await self._starts.find_attachment(wanted.memory, ref) is None:
            problem = NotAttached(f"{former} is not attached to {wanted.memory} any more.")
            await self._starts.undo_and_say(held, problem)
            raise problem
        answer = await self._starts.restore_and_attach(wanted, ref)
        gone = await self._starts.is_gone(wanted.memory, former)
        moved = Moved(
            attachment=answer.attachment,
            restored=answer.restored,
            former=former,
            former_state=ENDED if gone else DETACHED,
        )
        return await self._finish(moved, held, asked, again=True)

    async def _finish(self, moved: Moved, held: HeldRecord, asked: KeyedCall | None, *, again: bool) -> Moved:
        memory, sandbox = moved.attachment.place
        await self._starts.wanted.note_started(memory, sandbox)
        await self._starts.finish(held, asked, asdict(moved), again=again)
        self._log.info("moved", memory=memory, sandbox=sandbox, former=moved.former)
        self._sidecar.events.publish(
            "memory.moved", memory=memory, sandbox=sandbox, former=moved.former, former_state=moved.former_state
        )
        return moved

    def _check_end(self, ref: str) -> None:
        """Raise a ``SidecarError`` if a sandbox could not be ended in any case."""
        try:
            self._starts.open_provider(ref.partition(":")[0]).check_end(ref)
        except SandboxNotAllowed as problem:
            problem.hint = "`memory-sidecar move --keep-old` (keep_old, over HTTP) only stops looking after it."
            raise

    async def _save(self, old: Attachment) -> ExportReceipt:
        """Export the old sandbox as a checkpoint, so that its conversation stays open. Raise ``NotMoved`` unless the head
        has it then."""
        if all(one.place != old.place for one in self._keeper.looked_after):
            care = CareOptions(conversation=old.conversation, by=old.by)
            await self._keeper.look_after(old.place, care)  # takes it over from another service, as it is
        receipt = await self._keeper.save(old.place, CHECKPOINT)
        if not receipt.is_saved:
            why = f": {receipt.reason.headline}" if receipt.reason else "."
            raise NotMoved(f"{old.sandbox} was not left. Its export was {receipt.outcome.value}{why}")
        return receipt

    async def _catch_up(
        self, wanted: StartRequest, old: Attachment, answer: Attached, exported: ExportReceipt | None
    ) -> tuple[Attached, ExportReceipt | None]:
        """Bring what was written in the old sandbox meanwhile into the new one, until there is nothing more. Raise
        ``NotMoved`` if that does not end."""
        for _ in range(ROUNDS):
            latest = await self._save(old)
            if latest.outcome is ExportOutcome.UNCHANGED and _holds(answer, latest):
                return answer, exported
            exported = latest
            answer = await self._starts.restore_and_attach(wanted, answer.attachment.sandbox)
            if not _holds(answer, latest):
                break
        raise NotMoved(f"{old.sandbox} was not left: memory is still being written, there or by others.")

    async def _let_go(self, old: Attachment, *, keep: bool) -> None:
        """End the old sandbox, or only stop looking after it. Raise a ``SidecarError`` if it was not ended."""
        if not keep:
            try:
                await self._starts.open_provider(old.sandbox.partition(":")[0]).end(old.sandbox)
            except SidecarError:
                if not await self._starts.is_gone(old.memory, old.sandbox):
                    raise
        try:
            # As it stands now: an export or a take-over may have changed it.
            if (attachment := await self._starts.find_attachment(*old.place)) is not None:
                await self._keeper.detach(attachment)
        except SidecarError as problem:
            if keep:
                raise
            # It is gone, and the keeper will see that.
            self._log.warning("could not note that it was ended", sandbox=old.sandbox, **problem.as_dict())


def _holds(answer: Attached, exported: ExportReceipt) -> bool:
    """Whether the new sandbox has what was exported last."""
    return answer.restored is not None and answer.restored.snapshot == (exported.snapshot or exported.head)


def _build_start(request: MoveRequest, old: Attachment | None) -> StartRequest:
    """Return what is asked for in the new place: what the old sandbox had, but for a user of another provider."""
    care = CareOptions(lasting=True, user=request.user)
    if old is not None:
        stays = old.sandbox.partition(":")[0] == request.provider
        care = replace(
            care,
            layouts=old.layouts,
            projects=old.projects,
            checkpoint_every=old.checkpoint_every,
            conversation=old.conversation,
            user=request.user or (old.user if stays else ""),
            by=old.by,
        )
    return StartRequest(
        provider=request.provider,
        template=request.template,
        metadata=request.metadata,
        timeout=request.timeout,
        restore=RestoreRequest(
            memory=request.memory,
            projects=None if care.projects is None else tuple(care.projects),
            conversation=care.conversation,
            must_exist=True,
        ),
        care=care,
    )
