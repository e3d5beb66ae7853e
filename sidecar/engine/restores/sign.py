"""Say in a sandbox that there is no memory to wait for yet: the ``ready.json`` of a first start.

After a restore with something to put in place, the program or the script in the sandbox writes it (``program/ready.py``).
"""

from __future__ import annotations

import json
import shlex
import time

from sidecar.engine.restores.run import RestoreRun
from sidecar.errors import SandboxUnwritable
from sidecar.program.ready import NAME

COMMAND = """cache="${{XDG_CACHE_HOME:-$HOME/.cache}}/memory-sidecar"
umask 077
[ ! -L "$cache" ] && mkdir -p "$cache" && printf '%s\\n' {value} > "$cache/{name}.new" || exit 1
mv -f "$cache/{name}.new" "$cache/{name}"
"""
SECONDS = 30.0
MOST_OUTPUT = 1 << 16


async def announce_first_start(run: RestoreRun) -> None:
    """Write the sign with one command. Raise ``SandboxUnwritable`` if that fails: somebody would wait for ever."""
    request = run.request
    value = {
        "outcome": "empty",
        "memory": request.memory,
        "snapshot": None,
        "sandbox": run.sandbox.ref,
        "conversation": request.conversation,
        "kept": False,
        "read_only": request.read_only,
        "files": 0,
        "bytes": 0,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    command = COMMAND.format(value=shlex.quote(json.dumps(value)), name=NAME)
    done = await run.sandbox.run(command, timeout=SECONDS, output_limit=MOST_OUTPUT)
    if done.exit_code:
        raise SandboxUnwritable(f"{NAME} could not be written in {run.sandbox.ref}: {done.complaint.strip()[:200]}")
