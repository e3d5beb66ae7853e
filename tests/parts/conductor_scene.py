"""Where a conductor's days happen: a store, services, sandboxes; the two verbs, and what must be true after each of them.

(a) every word that was there when a save was acknowledged is in the head or in a snapshot that a receipt named;
(b) everything else that was lost was called lost;
(c) nothing was called saved that was not;
(d) a restore never destroyed what no snapshot has.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from dataclasses import asdict, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from sidecar.client import Client, Retries
from sidecar.errors import SidecarError
from tests.parts.agent_homes import Box
from tests.parts.homes import tree, without_cache
from tests.parts.ledger import NONE, Broken, Ledger, Words, some, words_in
from tests.parts.mortals import Fate, InThisProcess, Means, Ran, Served
from tests.parts.providers import Provider
from tests.parts.services import TOKEN

MAIN, WORKER, MISTYPED = "conductor", "worker", "conductro"
KINDS = ("notes", "transcripts")
MEMORIES = (MAIN, WORKER, MISTYPED)
SAVED = ("committed", "unchanged")
ONCE = Retries(attempts=1)
DEADLINE = 20.0
LONG_AGO = 3600


class Running:
    """A service of the day, and a client of it."""

    def __init__(self, number: int, served: Served) -> None:
        self.number = number
        self.served = served
        self.client = Client(served.url, token=TOKEN, retries=ONCE)

    def rows(self) -> dict[tuple[str, str], Any]:
        return {(row.memory, row.sandbox): row for row in self.client.attachments()}

    @property
    def instance(self) -> str:
        return str(self.client.overview().service)

    def at_risk(self) -> float:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        lines = httpx.get(f"{self.served.url}/metrics", headers=headers, trust_env=False).text.splitlines()
        found = [line for line in lines if line.startswith("memory_sidecar_attachments_at_risk ")]
        return float(found[0].rpartition(" ")[2])


class Scene:
    def __init__(self, seed: int, folder: Path, means: Means, provider: Provider) -> None:
        self.chance = random.Random(seed)
        self.folder = folder
        self.means = means
        self.provider = provider
        self.store = folder / "store"
        self.config = folder / "config.toml"
        self.limited = False
        self._configure()
        self.ledger = Ledger(self.look_up, folder, self.store)
        self.kinds = [kind for kind in KINDS if self.chance.random() < 0.7]
        self.boxes: list[Box] = []
        self.services: list[Running] = []
        self.story: list[str] = []
        self.counts: Counter[str] = Counter()
        self._numbers = iter(range(1, 10**6))
        self._aside = 0

    def start_service(self) -> None:
        served = self.means.serve(f"file:{self.store}", self.config)
        self.services.append(Running(next(self._numbers), served))
        self.tell(f"  service {self.services[-1].number} starts")

    # The two verbs, by whoever does them

    def restore(
        self,
        box: Box,
        *,
        memory: str = MAIN,
        by_service: bool | None = None,
        service: Running | None = None,
        fate: Fate | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        service = self._who(by_service, service)
        before, unsaved_tree = box.words(), without_cache(tree(box.home)) if box.alive else {}
        box.owed |= before
        if service is None:
            words = ["restore", memory, "--sandbox", box.ref]
            for name, value in options.items():
                if name not in ("conversation", "checkpoint_every"):
                    words += [f"--{name.replace('_', '-')}", *([value] if isinstance(value, str) else [])]
            ran = self.command(*words, fate=fate)
        else:
            ran = self.ask(service, fate, "restore", memory, sandbox=box.ref, **options)
        receipt = ran.document if "outcome" in ran.document else {}
        self.tell(f"  restore {memory} into {box.name} {self._by(service)}{options or ''}: {brief(ran)}")
        self.check_restore(box, memory, before, receipt, options, unsaved_tree, ran)
        if service is not None and receipt.get("outcome") in ("complete", "empty") and not ran.code:
            opens = not options.get("read_only") and "snapshot" not in options
            if opens:
                box.opened, box.memory, box.opened_at = True, memory, time.time()
                told = any("not looked after" in warning for warning in receipt["warnings"])
                with contextlib.suppress(SidecarError):  # it may be about to end
                    row = service.rows().get((memory, box.ref))
                    if not told and (row is None or row.state != "open"):
                        raise Broken(f"a restore into {box.name} opened no conversation: {row}")
        return receipt

    def check_restore(
        self,
        box: Box,
        memory: str,
        before: Words,
        receipt: dict[str, Any],
        options: dict[str, Any],
        tree_before: Any = None,
        ran: Ran | None = None,
    ) -> None:
        """Check one restore: (d), and that the receipt says what happened."""
        known = self.ledger.kept()
        head = self.ledger.head(memory)
        for name in MEMORIES:
            self.ledger.look(name)
        outcome, after = receipt.get("outcome", ""), box.words()
        aside = NONE
        if receipt.get("set_aside"):
            place = Path(receipt["set_aside"]["path"])
            aside = words_in(place, everywhere=True)
            self._aside += 1
        lost = before - after
        if options.get("discard"):
            box.owed &= after | self.ledger.kept()
        elif outcome == "complete":
            # What a service has exported meanwhile needs no naming; what the restore itself has, does.
            unnamed = lost - known - self.ledger.kept(origin="saved-first") - aside
            saved = self._saved_first(receipt, memory)
            if unnamed - saved:
                raise Broken(f"the restore destroyed {some(unnamed - saved)} of {box.name}, and no receipt names it")
        if outcome in ("incomplete", "empty") and after != before and not box.shaken:
            raise Broken(f"{outcome}, and {box.name} is not as it was: {some(before ^ after)}")
        if outcome == "complete" and receipt["kept"]:
            if after != before and not box.shaken:
                raise Broken(f"{box.name} was kept as it is, and changed: {some(before ^ after)}")
            if (
                tree_before is not None
                and without_cache(tree(box.home)).keys() != tree_before.keys()
                and not box.shaken
            ):
                raise Broken(f"{box.name} was kept as it is, and its files are others")
            amiss = self.ledger.words_of(memory, receipt["snapshot"]) - after - box.removed
            if amiss and "snapshot" not in options:
                raise Broken(f"{box.name} was kept, but does not have {some(amiss)} of the head")
        elif outcome == "complete":
            wanted = self.ledger.words_of(memory, receipt["snapshot"])
            if wanted - after:
                raise Broken(f"{box.name} did not get {some(wanted - after)} of {receipt['snapshot']}")
            # Services export by themselves, so that the head may move at any time.
            if "snapshot" not in options and receipt["snapshot"] not in (head, self.ledger.head(memory)):
                raise Broken(f"{box.name} got {receipt['snapshot']} and not the head {head}")
            usual = not options.get("discard") and not options.get("read_only") and "snapshot" not in options
            if usual and lost and self._is_ahead(box, memory, head):
                raise Broken(f"{box.name} was ahead of the head, and lost {some(lost)} to it")
        if outcome == "empty" and head:
            raise Broken(f"{memory} has a head, and the restore says it is a first start")
        if outcome == "complete":
            box.arrived.update((word, time.time()) for word in after - before)
            box.removed -= after
            box.shaken = False
            box.holds, box.reader, box.base = memory, bool(options.get("read_only")), receipt["snapshot"]
            if not receipt["kept"]:
                box.removed.clear()
                box.wiped.clear()
        elif ran is not None and not outcome:
            box.shaken = True
        if not options.get("discard"):
            self.check_box(box, aside)

    def _is_ahead(self, box: Box, memory: str, head: str) -> bool:
        """Whether a sandbox held the head, and has only grown since."""
        sound = not (box.removed or box.wiped or box.shaken or box.reader)
        return sound and box.holds == memory and box.base == head == self.ledger.head(memory)

    def _saved_first(self, receipt: dict[str, Any], memory: str) -> Words:
        if not receipt.get("saved_first"):
            return NONE
        return self.ledger.words_of(receipt.get("saved_first_memory") or memory, receipt["saved_first"])

    def export(
        self,
        box: Box,
        *,
        memory: str = "",
        by_service: bool | None = None,
        service: Running | None = None,
        fate: Fate | None = None,
        writing: bool = False,
        expect: str = "",
        conversation: str = "",
    ) -> dict[str, Any]:
        memory = memory or box.holds or MAIN
        service = self._who(by_service, service)
        before = box.words()
        box.owed |= before
        with box.writing() if writing else contextlib.nullcontext():
            if service is None:
                more = ["--conversation", conversation] if conversation else []
                ran = self.command("export", memory, "--sandbox", box.ref, *more, fate=fate)
            else:
                ran = self.ask(service, fate, "export", memory, sandbox=box.ref, conversation=conversation)
        after = box.words()
        self.tell(f"  export {memory} from {box.name} {self._by(service)}: {brief(ran)}")
        receipt = ran.document if "outcome" in ran.document else {}
        self.check_export(box, memory, before, after, receipt, ran if service is None else None, service)
        if expect and receipt.get("outcome") != expect:
            raise Broken(f"the export of {box.name} should be {expect}: {ran}")
        return receipt

    def check_export(
        self,
        box: Box,
        memory: str,
        before: Words,
        after: Words,
        receipt: dict[str, Any],
        ran: Ran | None,
        service: Running | None,
    ) -> None:
        """Check one export: (c), and that what is kept is what was there."""
        old = self.ledger.head(memory)
        held = {name: self.ledger.head(name) for name in MEMORIES if name != memory}
        new = self.ledger.look(memory, accepted=bool(receipt.get("accepted")))
        for name, head in held.items():
            if self.ledger.look(name) != head and not self.services:
                raise Broken(f"an export of {memory} moved the head of {name}")
        outcome = receipt.get("outcome", "")
        if not outcome:
            box.shaken = box.shaken or ran is None or ran.code != 1
            self.check_box(box)
            return
        box.shaken = False
        kept = self.ledger.words_of(memory, receipt["snapshot"])
        if receipt["snapshot"]:
            box.closed_at = time.time()
        if outcome in SAVED and not before <= kept:
            raise Broken(f"{outcome}, but {receipt['snapshot']} does not have {some(before - kept)} of {box.name}")
        if outcome in SAVED and not kept <= before | after:
            raise Broken(
                f"{outcome}, but {receipt['snapshot']} has {some(kept - before - after)} that {box.name} has not"
            )
        if outcome == "committed" and not (receipt["snapshot"] == receipt["head"] == new):
            raise Broken(f"committed {receipt['snapshot']}, and the head is {new}")
        if outcome in SAVED and receipt["snapshot"] == receipt["head"]:
            unsaved = before - self.ledger.head_words(memory)
            if unsaved:
                raise Broken(f"{outcome} at the head, which does not have {some(unsaved)} of {box.name}")
            if box.reader and outcome == "committed":
                raise Broken(f"{box.name} was restored to be read, and its export became the head")
            mixed_up = box.holds and box.holds != memory and old != new and old
            if mixed_up and self.ledger.store == "first":
                raise Broken(f"{box.name} holds {box.holds}, and became the head of {memory}")
            box.holds, box.base = memory, receipt["snapshot"]
            box.removed.clear()
        if outcome in ("diverged", "rejected"):
            if old != new and not self.services:
                raise Broken(f"{outcome}, and the head moved from {old} to {new}")
            if receipt["snapshot"] and not before <= kept:
                raise Broken(f"{outcome}, and what is kept does not have {some(before - kept)}")
            if ran is not None and ran.code != 3:
                raise Broken(f"{outcome}, and the exit code is {ran.code}")
        elif ran is not None and ran.code != 0:
            raise Broken(f"{outcome}, and the exit code is {ran.code}")
        if service is not None and (outcome in SAVED or receipt["snapshot"]):
            row = None
            with contextlib.suppress(SidecarError):  # it may be about to end
                row = service.rows().get((memory, box.ref))
            if row is not None and not row.lasting:
                box.opened = False
            if row is not None and outcome in ("diverged", "rejected") and not row.problem:
                raise Broken(f"{outcome}, and its attachment has no problem: {row}")
        self.check_box(box)

    def check_box(self, box: Box, announced: Words = NONE) -> None:
        """(d): what was ever in a sandbox is there, in a snapshot, or set aside with a receipt that says where."""
        box.owed -= announced
        if not box.alive:
            return
        missing = box.owed - box.words() - self.ledger.kept()
        if missing and (missing - box.words_anywhere() or not box.shaken):
            where = "nowhere" if missing - box.words_anywhere() else "in the sidecar's folder, and nobody was told"
            raise Broken(f"{some(missing)} of {box.name} are {where}")

    # How it stands, after each step

    def audit(self) -> None:
        for memory in MEMORIES:
            self.ledger.look(memory)
        for box in self.boxes:
            self.check_box(box)
        for service in self.services:
            self._check_attachments(service)

    def _check_attachments(self, service: Running) -> None:
        """(c): what an attachment says is saved, the head has or had."""
        rows = service.rows()
        boxes = {box.ref: box for box in self.boxes}
        for memory in {memory for memory, _ in rows}:
            self.ledger.look(memory)
        for (memory, ref), row in rows.items():
            box = boxes[ref]
            if row.state in ("open", "idle") and row.saved and not row.problem:
                until = moment(row.saved)
                wrote = {
                    word
                    for word in box.owed - self.ledger.forgotten
                    if (write := self.ledger.written[word]).box == box.name
                    and max(write.at, box.arrived.get(word, 0.0)) < until
                }
                unsaved = wrote - self.ledger.words_of(memory, row.snapshot) - self.ledger.head_words(memory)
                unsaved -= self.ledger.kept(beside=memory)  # another memory's, in the same sandbox
                # Files of a system that the snapshot knows nothing of came with the sandbox, or are another memory's.
                unsaved &= box.words_of(self.ledger.systems_of(memory, row.snapshot))
                if unsaved:
                    raise Broken(
                        f"{box.name} is called saved at {row.saved} ({row.state}, {row.snapshot}), and the head does not"
                        f" have {some(unsaved)}"
                    )
            if row.state == "lost" and box.alive:
                raise Broken(f"{box.name} is alive, and called lost")
            if row.state == "ended" and box.alive:
                raise Broken(f"{box.name} is alive, and called ended")
            lost = self._lost_with(box)
            if row.state == "ended" and lost and not row.problem and box.opened_at > box.closed_at:
                raise Broken(f"{box.name} has ended, quietly, within a conversation and with {some(lost)}")
            early = {word for word in lost if row.saved and self.ledger.written[word].at < moment(row.saved)}
            if row.state == "lost" and (not row.problem or early):
                raise Broken(
                    f"{box.name} is lost since {row.saved} ({row.problem}), with {some(early)} from before that"
                )
        deadline = time.monotonic() + DEADLINE
        # What another service noted is seen when it next looks around; what is taken over may be saved meanwhile.
        while (told := service.at_risk()) < (risks := self._risks(service)):
            if time.monotonic() > deadline:
                raise Broken(f"at_risk is {told}, and {risks} attachments have a problem or are lost")
            time.sleep(0.1)

    def _risks(self, service: Running) -> int:
        """How many attachments of a service have a problem, or are lost, by what the store says."""
        mine = service.instance
        return sum(row.owner == mine and (row.state == "lost" or bool(row.problem)) for row in service.rows().values())

    def _lost_with(self, box: Box) -> set[str]:
        """What went with a sandbox and is in no snapshot."""
        return set() if box.alive else {word for word in box.last_words & box.owed if word not in self.ledger.kept()}

    def check_the_dead(self) -> None:
        """(a): what a caller had a receipt for did not go with its sandbox."""
        for box in self.boxes:
            early = {word for word in self._lost_with(box) if self.ledger.written[word].at < box.closed_at}
            if early - box.during:
                raise Broken(f"{box.name} is gone with {some(early)} from before its last export")

    def export_of_the_dead(self, box: Box) -> None:
        """The conductor does not know that its sandbox is gone."""
        service = self.chance.choice(self.services)
        row = service.rows().get((MAIN, box.ref))
        ran = self.ask(service, None, "export", MAIN, sandbox=box.ref)
        self.tell(f"  export of {box.name}, which is dead, {self._by(service)}: {brief(ran)}")
        if ran.document.get("outcome"):
            raise Broken(f"an export of a dead sandbox has an outcome: {ran}")
        after = service.rows().get((MAIN, box.ref))
        lost, ours = self._lost_with(box), row is not None and row.state == "open" and row.owner == service.instance
        if ours and lost and box.opened_at > box.closed_at and (after is None or after.state != "lost"):
            raise Broken(f"{box.name} is lost with {some(lost)}, and its attachment says {after}")

    # Services

    def stop_service(self, service: Running) -> None:
        """SIGTERM: exit code 0 says that the head has all that it looked after."""
        looked_after: list[Any] = []
        if not service.served.doomed:
            with contextlib.suppress(SidecarError):
                mine = service.instance
                looked_after = [
                    row
                    for row in service.rows().values()
                    if row.owner == mine and (row.state == "open" or (row.state == "idle" and row.lasting))
                ]
        boxes = {box.ref: box for box in self.boxes}
        words = {row.sandbox: boxes[row.sandbox].words() for row in looked_after}
        code = service.served.stop()
        self.services.remove(service)
        self.tell(f"  service {service.number} stops: {code}; it looked after {[boxes[ref].name for ref in words]}")
        for memory in MEMORIES:
            self.ledger.look(memory)
        for row in looked_after:
            box = boxes[row.sandbox]
            unsaved = words[row.sandbox] - self.ledger.head_words(row.memory) - self.ledger.forgotten
            if code == 0 and box.alive and unsaved:
                raise Broken(
                    f"the service exits 0, and the head of {row.memory} does not have {some(unsaved)} of {box.name}"
                )
            lost = self._lost_with(box)
            # One that goes after its caller's export has ended, also where it was attached by name.
            if code == 0 and lost and box.opened_at > box.closed_at:
                raise Broken(f"the service exits 0, and {box.name} is gone with {some(lost)}")

    def kill(self, service: Running) -> None:
        """``kill -9``; and time goes by, until others know that it is dead."""
        service.served.kill()
        self.services.remove(service)
        self.tell(f"  service {service.number} is killed")
        self.age_instances()

    def age_instances(self) -> None:
        living = [other.instance for other in self.services]
        for place in (self.store / "instances").glob("*.json"):
            if place.stem not in living:
                long_ago = time.time() - LONG_AGO
                with contextlib.suppress(FileNotFoundError):
                    os.utime(place, (long_ago, long_ago))

    def wait_for_take_over(self) -> None:
        """Until no attachment is left without a service, and each that was taken over has been exported or has a problem."""
        service = self.services[-1]
        deadline = time.monotonic() + DEADLINE
        while True:
            living = {other.instance for other in self.services}
            rows = service.rows().values()
            open_rows = [row for row in rows if row.state == "open" or (row.state == "idle" and row.lasting)]
            if all(row.owner in living for row in open_rows):
                return
            if time.monotonic() > deadline:
                raise Broken(f"nobody took over: {[(row.sandbox, row.owner, row.state) for row in open_rows]}")
            time.sleep(0.05)

    def ask(self, service: Running, fate: Fate | None, verb: str, memory: str, **more: Any) -> Ran:
        """Ask a service; what it says once it is doomed counts as not said."""
        if fate is not None:
            service.served.doom(fate)
        try:
            receipt = getattr(service.client, verb)(memory, **more)
            assert is_dataclass(receipt) and not isinstance(receipt, type)
            ran = Ran(0, asdict(receipt))
        except SidecarError as problem:
            ran = Ran(1, {"error": problem.as_dict()})
        if fate is not None:
            if service.served.doomed and fate.kind != "stop":
                ran = Ran(-9, {})
                self.kill_if_doomed(service)
            elif not service.served.doomed:
                service.served.doom(None)
        return ran

    def kill_if_doomed(self, service: Running) -> None:
        if service in self.services:
            self.kill(service)
            self.start_service()
            self.wait_for_take_over()

    # Small things

    def command(self, *words: str, fate: Fate | None = None) -> Ran:
        name, *rest = words
        return self.means.run([name, f"--store=file:{self.store}", f"--config={self.config}", "--json", *rest], fate)

    def look_up(self, *words: str) -> tuple[int, dict[str, Any]]:
        """A command that only looks, for the ledger: in this process, since there are many."""
        name, *rest = words
        ran = InThisProcess().run([name, f"--store=file:{self.store}", "--json", *rest])
        return ran.code, ran.document

    def _configure(self) -> None:
        limits = "[limits]\nbytes = 20000\n" if self.limited else ""
        self.config.write_text(f"[service]\nlease = 5\ncheckpoint_every = 3600\ndrill_every = 0\n{limits}")

    def set_limit(self, limited: bool) -> None:
        """For commands, and for services that start from now on."""
        self.limited = limited
        self._configure()
        self.tell(f"  the limit is {'low' if limited else 'high'}")

    def _who(self, by_service: bool | None, service: Running | None) -> Running | None:
        if service is not None or by_service is False or not self.services:
            return service
        return self.chance.choice(self.services) if by_service or self.chance.random() < 0.6 else None

    def _by(self, service: Running | None) -> str:
        return f"by service {service.number}" if service is not None else "by command"

    def some_fate(self) -> Fate:
        kind = self.chance.choice(("before", "after", "during", "during", "interrupt", "trouble"))
        return Fate(kind, self.chance.randint(1, 10), self.chance)  # type: ignore[arg-type]

    def new_box(self) -> Box:
        box = Box(
            self.provider.create(),
            f"box{next(self._numbers)}",
            self.ledger,
            random.Random(self.chance.random()),
            self.kinds,
        )
        self.boxes.append(box)
        return box

    def some_box(self) -> Box:
        living = [box for box in self.boxes if box.alive][-4:]
        return self.chance.choice(living) if living else self.new_box()

    def kill_box(self, box: Box) -> None:
        box.die()
        self.tell(f"  {box.name} dies{' within a conversation' if box.opened else ''}")

    def new_talk(self) -> str:
        return f"c{next(self._numbers)}"

    def tell(self, line: str) -> None:
        self.story.append(line)


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def brief(ran: Ran) -> str:
    receipt = ran.document
    if "outcome" not in receipt:
        error = receipt.get("error", {})
        return f"{ran.code} {error.get('code', '')} {error.get('message', '')}"
    names = ("snapshot", "head", "kept", "saved_first", "saved_first_memory", "set_aside", "accepted")
    told = {name: receipt[name] for name in names if receipt.get(name)}
    reason = f" [{receipt['reason']['code']}]" if receipt.get("reason") else ""
    return f"{ran.code} {receipt['outcome']}{reason} {told} {' '.join(receipt['warnings'])[:300]}"
