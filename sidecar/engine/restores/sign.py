"""The sign in a sandbox that its memory is in place, ``ready.json``: written for a first start, and read.

After a restore with something to put in place, the program or the script in the sandbox writes it (``program/ready.py``).
"""

from __future__ import annotations

import json
import shlex
import time

from sidecar.engine.restores.run import RestoreRun
from sidecar.errors import SandboxError, SandboxUnwritable
from sidecar.host.values import dataclass
from sidecar.ports import Sandbox
from sidecar.program.ready import NAME

COMMAND = """cache="${{XDG_CACHE_HOME:-$HOME/.cache}}/memory-sidecar"
umask 077
[ ! -L "$cache" ] && mkdir -p "$cache" && printf '%s\\n' {value} > "$cache/{name}.new" || exit 1
mv -f "$cache/{name}.new" "$cache/{name}"
"""
READ = """cat "${{XDG_CACHE_HOME:-$HOME/.cache}}/memory-sidecar/{name}" 2>/dev/null
:
"""
USED = """sign="${{XDG_CACHE_HOME:-$HOME/.cache}}/memory-sidecar/{name}"
[ -f "$sign" ] || exit 1
for place in "$HOME" "$PWD"; do
    found=$(find "$place" -xdev -path "${{sign%/*}}" -prune -o ! -type d -cnewer "$sign" -print) || exit 1
    [ -z "$found" ] || exit 1
done
echo unused
"""
SECONDS = 30.0
MOST_OUTPUT = 1 << 16


@dataclass(frozen=True, slots=True)
class Sign:
    """What a sandbox says of its last restore. Its agent can have written anything there."""

    memory: str
    sandbox: str
    """The sandbox that it was written for; a copy of a sandbox has the sign of the one it was made from."""
    outcome: str = ""
    snapshot: str | None = None
    read_only: bool = False


async def read_sign(sandbox: Sandbox) -> Sign | None:
    """Return the sign in a sandbox, with one command; ``None`` if there is none for this sandbox. Raise a
    ``SidecarError``."""
    import msgspec  # late: few restores look for it

    done = await sandbox.run(READ.format(name=NAME), timeout=SECONDS, output_limit=MOST_OUTPUT)
    for line in reversed(done.output.decode("utf-8", "replace").splitlines()):
        try:
            sign = msgspec.json.decode(line, type=Sign)
        except (msgspec.DecodeError, UnicodeEncodeError):
            continue  # what a shell prints when it starts
        return sign if sign.sandbox == sandbox.ref else None
    return None


async def is_unused(sandbox: Sandbox) -> bool:
    """Whether nothing was written in a sandbox's home and working folder since its sign was, for certain: false where that
    cannot be said."""
    try:
        done = await sandbox.run(USED.format(name=NAME), timeout=SECONDS, output_limit=MOST_OUTPUT)
    except SandboxError:
        return False
    return not done.exit_code and b"unused" in done.output.splitlines()


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
