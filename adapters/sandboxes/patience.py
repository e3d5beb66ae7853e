"""Run a command that may take longer than a request may: proxies cut a request that stays silent for a minute.

The command runs in the background of the sandbox and the first request waits for it a while; most are done by then. If it
is not, more requests wait on. What it prints is kept in a folder there, up to a limit, until it is fetched.
"""

from __future__ import annotations

import re
import secrets
import shlex

# Whoever prints too much is killed, as is whoever runs on although nobody asks for it any more. A sleep that has only just
# been forked does not hear anything less than KILL.
_RUNNER = """echo $$ > "$1/pid"
( trap 'kill -s KILL $!; exit' TERM; sleep "$4" & wait $!; kill -s KILL -- "-$$" ) &
l=$!
{ /bin/sh -c "$2" 2>&1 </dev/null; echo $? > "$1/code"; } | {
head -c "$3" > "$1/out"
if [ "$(($(wc -c < "$1/out")))" -ge "$3" ]; then echo 137 > "$1/code"; : > "$1/done"; kill -s KILL -- "-$$"; fi
}
: > "$1/done"
kill $l
"""

_COLLECT = """collect() {
cat "$d/out"
code=$(cat "$d/code")
rm -rf "$d"
printf '\\nmemory-sidecar-exit %s\\n' "${code:-137}"
exit 0
}
"""

_START = """umask 077
if mkdir "$d"; then
run() { command -v setsid >/dev/null && exec setsid "$@"; exec "$@"; }
run /bin/sh -c "$runner" sh "$d" "$script" "$limit" "$longest" </dev/null >/dev/null 2>&1 &
p=$!
trap : USR1
( trap 'kill -s KILL $!; exit' TERM; sleep "$patience" & wait $!; kill -USR1 $$ ) </dev/null >/dev/null &
w=$!
wait $p
if [ -e "$d/done" ] || ! kill -0 $p; then kill $w; wait $w; collect; fi
echo memory-sidecar-running
exit 0
fi
"""

_WAIT = """i=0
p=$(cat "$d/pid")
while [ ! -e "$d/done" ] && kill -0 "$p" && [ $i -lt "$patience" ]; do sleep 1; i=$((i+1)); done
if [ -e "$d/done" ] || ! kill -0 "$p"; then collect; fi
echo memory-sidecar-running
"""

# It may overtake the start. One that never comes has ended already.
_KILL = """for i in 1 2 3; do [ -e "$d/pid" ] && break; sleep 1; done
p=$(cat "$d/pid") && { kill -s KILL -- "-$p" || kill -s KILL "$p"; }
rm -rf "$d"
"""

_ENDED = re.compile(r"\n?memory-sidecar-exit (\d+)\n*\Z")
_RUNNING = re.compile(r"\s*memory-sidecar-running\s*\Z")


class Patient:
    """One command, as the requests that start it, wait for it and kill it. Each is for a POSIX shell."""

    def __init__(self, script: str, *, output_limit: int, longest: int) -> None:
        self._folder = f"/tmp/memory-sidecar-{secrets.token_hex(8)}.run"
        self._script = script
        self._limit = output_limit + 1
        self._longest = longest

    def start(self, patience: int) -> str:
        """Sent twice (SDKs and proxies do that), it waits for the command that runs already instead of starting another."""
        return self._request(
            _COLLECT + _START + _WAIT,
            runner=_RUNNER,
            script=self._script,
            limit=str(self._limit),
            longest=str(self._longest),
            patience=str(patience),
        )

    def wait(self, patience: int) -> str:
        return self._request(_COLLECT + _WAIT, patience=str(patience))

    @property
    def kill(self) -> str:
        return self._request(_KILL)

    def _request(self, text: str, **variables: str) -> str:
        given = "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())
        # The sandbox's own shell may be zsh, which is not a POSIX one; and shells like to talk of the jobs they had. Not as an
        # argument: those have an end, and quotes in quotes take much of it.
        end = f"end-{secrets.token_hex(8)}"
        return f"exec /bin/sh <<'{end}'\nexec 2>/dev/null\nd={self._folder}\n{given}{text}\n{end}\n"


def ending(output: str) -> tuple[str, int] | None:
    """What the command printed and its exit code; ``None`` while it runs. Raise ``ValueError`` for half an answer."""
    if ended := _ENDED.search(output):
        return output[: ended.start()], int(ended[1])
    if _RUNNING.match(output):
        return None
    raise ValueError("the answer did not arrive whole")
