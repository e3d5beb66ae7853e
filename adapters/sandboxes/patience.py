"""Run a command that may take longer than a request may: proxies cut a request that stays silent for a minute.

The command runs in the background of the sandbox and the first request waits for it a while; most are done by then. If it
is not, more requests wait on. What it prints is kept in a folder there, up to a limit, until it is fetched.
"""

from __future__ import annotations

import secrets
import shlex

STILL_RUNNING = 75
"""Exit code of a request that waited in vain."""

_RUNNER = """echo $$ > "$1/pid"
{ /bin/sh -c "$2" 2>&1 </dev/null; echo $? > "$1/code"; } | head -c "$3" > "$1/out"
: > "$1/done"
"""

_COLLECT = """collect() { cat "$d/out" 2>/dev/null; r=$(cat "$d/code" 2>/dev/null); rm -rf "$d"; exit "${r:-137}"; }
"""

_START = """umask 077
if mkdir "$d" 2>/dev/null; then
run() { command -v setsid >/dev/null 2>&1 && exec setsid "$@"; exec "$@"; }
run /bin/sh -c "$runner" sh "$d" "$script" "$limit" </dev/null >/dev/null 2>&1 &
p=$!
trap : USR1
( trap 'kill $s 2>/dev/null; exit' TERM; sleep "$patience" & s=$!; wait $s; kill -USR1 $$ ) </dev/null >/dev/null 2>&1 &
w=$!
wait $p
if [ -e "$d/done" ] || ! kill -0 $p 2>/dev/null; then kill $w 2>/dev/null; wait $w; collect; fi
exit $still
fi
"""

_WAIT = """i=0
p=$(cat "$d/pid" 2>/dev/null)
while [ ! -e "$d/done" ] && kill -0 "$p" 2>/dev/null && [ $i -lt "$patience" ]; do sleep 1; i=$((i+1)); done
if [ -e "$d/done" ] || ! kill -0 "$p" 2>/dev/null; then collect; fi
"""

_KILL = """p=$(cat "$d/pid" 2>/dev/null) && { kill -s KILL -- "-$p" 2>/dev/null || kill -s KILL "$p" 2>/dev/null; }
rm -rf "$d"
"""


class Patient:
    """One command, as the requests that start it, wait for it and kill it. Each is for a POSIX shell."""

    def __init__(self, script: str, *, output_limit: int, patience: int) -> None:
        self._folder = f"/tmp/memory-sidecar-{secrets.token_hex(8)}.run"
        self._script = script
        self._limit = output_limit + 1
        self._patience = patience

    @property
    def start(self) -> str:
        """Sent twice (SDKs and proxies do that), it waits for the command that runs already instead of starting another."""
        return self._request(
            _COLLECT + _START + _WAIT,
            runner=_RUNNER,
            script=self._script,
            limit=str(self._limit),
            patience=str(self._patience),
            still=str(STILL_RUNNING),
        )

    @property
    def wait(self) -> str:
        return self._request(_COLLECT + _WAIT, patience=str(self._patience))

    @property
    def kill(self) -> str:
        return self._request(_KILL)

    def _request(self, text: str, **variables: str) -> str:
        given = "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())
        script = f"d={self._folder}\n{given}{text}exit {STILL_RUNNING}\n"
        # The sandbox's own shell may be zsh, which is not a POSIX one.
        return f"exec /bin/sh -c {shlex.quote(script)}"
