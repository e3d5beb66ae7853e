"""The sign for the agent in a sandbox that its memory is in place: ``ready.json`` in the program's folder (scratch.py).

It is gone before a restore begins, and there again, with the essentials of the receipt, when the restore has ended well.
A copy of a sandbox has the sign of the one it was made from: ``sandbox`` says for which one it was written. The
sidecar reads it too (``read_sign`` in ``engine/restores``), as what anybody in the sandbox may have written.
"""

from __future__ import annotations

import json
import os
import time
from typing import List

from sidecar.format.protocol import RestoreAnswer, RestoreQuestion
from sidecar.format.refusal import Refusal
from sidecar.program import places
from sidecar.program.scratch import Scratch

NAME = "ready.json"


def retract(scratch: Scratch) -> None:
    """Remove the sign. Raise OSError or Refusal if it cannot be removed: an agent would take it for a new one."""
    place = _locate(scratch)
    if place != scratch.memory:  # a memory may be called "ready.json"; it has no sign
        places.remove(place)


def announce(scratch: Scratch, question: RestoreQuestion, answer: RestoreAnswer) -> List[str]:
    """Write the sign. Return a warning if it cannot be written: the memory is in place in any case."""
    place, told = _locate(scratch), question.identity
    value = {
        "outcome": "complete",
        "memory": question.memory,
        "snapshot": question.snapshot,
        "sandbox": told.sandbox,
        "conversation": told.conversation,
        "kept": answer.status == "kept",
        "read_only": question.read_only,
        **({"part": question.part} if question.part else {}),
        "files": answer.files,
        "bytes": answer.bytes,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    try:
        if place == scratch.memory:
            raise FileExistsError("a memory has that name")
        places.write_file(place, json.dumps(value).encode("ascii") + b"\n")
        scratch.give_to_user(place)
    except (OSError, Refusal) as problem:
        return ["%s cannot be written (%s): whoever waits for it in the sandbox will not see it." % (place, problem)]
    return []


def _locate(scratch: Scratch) -> str:
    return os.path.join(scratch.base, NAME)
