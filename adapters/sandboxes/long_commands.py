"""Run a command that may take longer than a request may: proxies cut a request that stays silent for a minute.

The command runs in the background of the sandbox and the first request waits for it a while; most are done by then. If
it is not, more requests wait. What it prints is kept in a folder in the sandbox, up to a limit, until it is fetched: in
/tmp, or in the home if /tmp is full or cannot be written.
"""

from __future__ import annotations

import re
import secrets
import shlex

from sidecar.errors import SandboxDenied, SandboxFull

ROOM_BYTES = 2 << 20
"""More than the sidecar's commands usually print: with less free space the output may not fit."""

# A command that prints too much is killed, and so is one that runs on although no request waits for it any more. A
# sleep that has only just been forked is stopped by KILL only.
_RUNNER = """echo $$ > "$1/pid"
( trap 'kill -s KILL $!; exit' TERM; sleep "$4" & wait $!; kill -s KILL -- "-$$" ) &
l=$!
{ /bin/sh -c "$2" 2>&1 </dev/null; echo $? > "$1/code"; } | {
head -c "$3" > "$1/out" || : > "$1/short"
if [ "$(($(wc -c < "$1/out")))" -ge "$3" ]; then echo 137 > "$1/code"; : > "$1/done"; kill -s KILL -- "-$$"; fi
}
: > "$1/done"
kill $l
"""

# $1: the name of the run's folder.
_BEGIN = """exec 2>/dev/null
d=/tmp/$1
[ -d "$d" ] || [ ! -d "$HOME/.$1" ] || d=$HOME/.$1
"""

_COLLECT = """collect() {
if [ -e "$d/short" ]; then rm -rf "$d"; echo memory-sidecar-no-room; exit 0; fi
echo memory-sidecar-output
cat "$d/out"
code=$(cat "$d/code")
rm -rf "$d"
printf '\\nmemory-sidecar-exit %s\\n' "${code:-137}"
exit 0
}
"""

# $2: seconds to wait, $3: the runner, $4: the script, $5: the most it may print, $6: the seconds it may take, $7: the
# free space needed. A folder that was removed is no place to start in: shells complain, and programs break.
_START = """umask 077
[ "$(pwd -P)" -ef . ] || cd "$HOME" || cd /
if [ ! -d "$d" ]; then
for d in "/tmp/$1" "$HOME/.$1" ""; do
[ -n "$d" ] || { echo memory-sidecar-no-room; exit 0; }
if mkdir "$d"; then
new=$d
head -c "$7" /dev/zero > "$d/out" && break
rm -rf "$d"
new=
elif [ -d "$d" ]; then break; fi
done
fi
if [ -n "${new-}" ]; then
run() { command -v setsid >/dev/null && exec setsid "$@"; exec "$@"; }
run /bin/sh -c "$3" sh "$d" "$4" "$5" "$6" </dev/null >/dev/null 2>&1 &
p=$!
trap : USR1
( trap 'kill -s KILL $!; exit' TERM; sleep "$2" & wait $!; kill -USR1 $$ ) </dev/null >/dev/null &
w=$!
wait $p
if [ -e "$d/done" ] || ! kill -0 $p; then kill $w; wait $w; collect; fi
echo memory-sidecar-running
exit 0
fi
"""

_WAIT = """i=0
p=$(cat "$d/pid")
while [ ! -e "$d/done" ] && kill -0 "$p" && [ $i -lt "$2" ]; do sleep 1; i=$((i+1)); done
if [ -e "$d/done" ] || ! kill -0 "$p"; then collect; fi
echo memory-sidecar-running
"""

# It may arrive before the start. A run whose pid never appears has ended already.
_KILL = """for i in 1 2 3; do [ -e "$d/pid" ] || [ -e "$HOME/.$1/pid" ] && break; sleep 1; done
[ -d "$d" ] || d=$HOME/.$1
p=$(cat "$d/pid") && { kill -s KILL -- "-$p" || kill -s KILL "$p"; }
rm -rf "$d"
"""

# In the sandbox's own shell, whichever that is. sudo passes on only the variables that are named, and none where its
# rules (SETENV) do not allow that: the sidecar then sends a file instead.
_AS_USER = """u={user}
if [ "$(id -un)" = "$u" ]; then set --
elif w=$(sudo -n -H -u "$u" {keep} -- true 2>&1); then set -- sudo -n -H -u "$u" {keep} --
elif w=$(sudo -n -H -u "$u" -- true 2>&1); then set -- sudo -n -H -u "$u" --
else printf 'memory-sidecar-not-as-user %s\\n' "$w"; exit 0; fi
"""

_OUTPUT, _EXIT = "memory-sidecar-output\n", "\nmemory-sidecar-exit "
_RUNNING = re.compile(r"(?:\A|\n)memory-sidecar-running\s*\Z")
_NO_ROOM = re.compile(r"memory-sidecar-no-room\s*\Z|no space left on device|read-only file system", re.IGNORECASE)
_NOT_AS_USER = re.compile(r"memory-sidecar-not-as-user ?(.*)", re.DOTALL)


class LongCommand:
    """One command, as the requests that start it, wait for it and kill it. Each is for a POSIX shell, or zsh.

    ``user`` is the user it runs as, if that is not the one the provider runs commands as; ``variables`` are the names
    of those it needs from the environment.
    """

    def __init__(
        self, script: str, *, output_limit: int, longest: int, user: str = "", variables: tuple[str, ...] = ()
    ) -> None:
        self._name = f"memory-sidecar-{secrets.token_hex(8)}.run"
        self._script = script
        self._limit = output_limit + 1
        self._longest = longest
        self._user = user
        self._variables = variables

    def start(self, patience: int) -> str:
        """Return the request that starts the command. If it is sent twice (SDKs and proxies do that), the second waits
        for the command instead of starting another."""
        given = [patience, _RUNNER, self._script, self._limit, self._longest, ROOM_BYTES]
        return self._build_request(_COLLECT + _START + _WAIT, *given)

    def wait(self, patience: int) -> str:
        """Return the request that waits for the command."""
        return self._build_request(_COLLECT + _WAIT, patience)

    @property
    def kill(self) -> str:
        """The request that kills the command."""
        return self._build_request(_KILL)

    def _build_request(self, text: str, *given: object) -> str:
        """Return a request that runs one of the scripts above in a POSIX shell."""
        # As arguments of /bin/sh: the sandbox's own shell may be zsh, which is not a POSIX one, and a here-document
        # would take space in /tmp. Each argument may have 128 KiB, so the script has one to itself.
        begin = _BEGIN + ("cd\n" if self._user else "")  # the working folder may be another user's home
        words = [begin + text, "sh", self._name, *map(str, given)]
        command = f"/bin/sh -c {' '.join(map(shlex.quote, words))}\n"
        return (
            f'{build_user_prefix(self._user, self._variables)}exec "$@" {command}' if self._user else f"exec {command}"
        )


def build_user_prefix(user: str, variables: tuple[str, ...] = ()) -> str:
    """Return the shell text that makes ``"$@"`` the beginning of a command run as this user, or reports that it cannot
    and exits."""
    keep = f"--preserve-env={','.join(variables)}" if variables else ""
    return _AS_USER.format(user=shlex.quote(user), keep=keep)


def check_user(output: str, user: str) -> None:
    """Raise ``SandboxDenied`` if a request reports that it may not work as this user."""
    if user and (said := _NOT_AS_USER.search(output)):
        raise SandboxDenied(
            f"The sandbox does not let us work as {user!r}: {' '.join(said[1].split())[:200] or 'sudo says nothing'}",
            hint=f"Allow it there (sudoers: NOPASSWD, for {user}), or leave out --user. Nothing was changed.",
        )


def parse_ending(output: str) -> tuple[str, int] | None:
    """Return what the command printed and its exit code; ``None`` while it runs.

    Raise ``SandboxFull`` if there was no space for its output, ``ValueError`` for an incomplete answer.
    """
    # What comes before it was printed by the sandbox's own shell, about a missing folder for example.
    printed, _, code = output.partition(_OUTPUT)[2].rpartition(_EXIT)
    if code.strip().isdecimal():
        return printed, int(code)
    if _RUNNING.search(output):
        return None
    if _NO_ROOM.search(output):
        raise SandboxFull(
            "There is no room for a command's output in the sandbox: neither /tmp nor the home can take 2 MB.",
            hint="Free some space there, or make one of them writable, then try again; the memory there is as it was.",
        )
    raise ValueError("the answer did not arrive whole")
