"""A toy conductor: it has conversations in throw-away sandboxes, and the sidecar makes the agent remember them.

For each conversation: a fresh folder as the sandbox, a restore, one more line in its MEMORY.md, an export, and the folder
is deleted. What a real conductor does is the same, with its agent in the middle. Should it be killed there, the sidecar exports
the sandbox by itself. Only the standard library is needed.

It and the sidecar see the folders under the same path: ``--sandboxes`` is a volume that both mount.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import urllib.parse
import uuid
from pathlib import Path
from typing import Any

PATIENCE = 120.0
"""Seconds of trying before giving up: longer than a sidecar takes to be replaced by a newer one."""
ANSWER_SECONDS = 600.0
PAUSE = 0.5
KEPT = {"committed", "unchanged"}
CAME_BACK = {"complete", "empty"}


class Refused(Exception):
    """The sidecar answered, and the answer is no."""


class Sidecar:
    """The two verbs over HTTP. A call that got no answer is sent again under the same key: it is done once."""

    def __init__(self, url: str, memory: str) -> None:
        self._url = url
        address = urllib.parse.urlsplit(url)
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 80
        self._path = f"/v1/memories/{urllib.parse.quote(memory, safe='')}"

    def restore(self, sandbox: Path, key: str) -> dict[str, Any]:
        return self._call("restores", {"sandbox": f"local:{sandbox}", "conversation": key}, key)

    def export(self, sandbox: Path, key: str) -> dict[str, Any]:
        return self._call("exports", {"sandbox": f"local:{sandbox}", "conversation": key}, key)

    def _call(self, verb: str, body: dict[str, str], key: str) -> dict[str, Any]:
        """The receipt. Raise ``Refused`` when another try cannot help, ``TimeoutError`` when none did."""
        trouble: object = None
        for _ in range(round(PATIENCE / PAUSE)):
            try:
                status, answer = self._send(verb, body, f"{verb}-{key}")
            except (OSError, http.client.HTTPException) as problem:
                trouble = problem
            else:
                if status == 200:
                    return answer
                trouble = f"{status}: {answer.get('detail')} {answer.get('hint', '')}"
                if not answer.get("retryable"):
                    raise Refused(trouble)
            threading.Event().wait(PAUSE)
        raise TimeoutError(f"No answer from the sidecar: {trouble}")

    def _send(self, verb: str, body: dict[str, str], key: str) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_SECONDS)
        try:
            headers = {"Content-Type": "application/json", "Idempotency-Key": key}
            if token := token_for(self._url):
                headers["Authorization"] = f"Bearer {token}"
            connection.request("POST", f"{self._path}/{verb}", json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except json.JSONDecodeError as problem:
            raise http.client.HTTPException(f"not JSON: {problem}") from None
        finally:
            connection.close()


def token_for(url: str) -> str:
    """The token of the environment; else, for a sidecar on this machine, the one that it keeps for its user."""
    token = os.environ.get("MEMORY_SIDECAR_TOKEN", "")
    if not token and urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1"):
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        with contextlib.suppress(OSError):
            token = Path(state, "memory-sidecar", "token").read_text("ascii").strip()
    return token


def converse(sidecar: Sidecar, sandboxes: Path) -> int:
    """One conversation. Return how many it remembers, this one included."""
    conversation = str(uuid.uuid4())
    sandbox = Path(tempfile.mkdtemp(prefix="sandbox-", dir=sandboxes))
    try:
        restored = sidecar.restore(sandbox, conversation)
        if restored["outcome"] not in CAME_BACK:
            raise Refused(f"The memory did not come back: {restored['reason']}")
        notes = sandbox / "MEMORY.md"
        with notes.open("a", encoding="utf-8") as file:
            file.write(f"- We talked, and this was conversation {conversation}.\n")
        remembered = len(notes.read_text("utf-8").splitlines())
        exported = sidecar.export(sandbox, conversation)
        if exported["outcome"] not in KEPT:
            raise Refused(f"The memory was not kept: {exported['outcome']}, {exported['reason']}")
    finally:
        shutil.rmtree(sandbox, ignore_errors=True)
    print(
        f"restore {restored['outcome']}, export {exported['outcome']} in {exported['duration_ms']} ms: "
        f"{remembered} conversations remembered",
        flush=True,
    )
    return remembered


def main() -> int:
    parser = argparse.ArgumentParser(description="A toy conductor.")
    parser.add_argument("--url", default=os.environ.get("MEMORY_SIDECAR_URL", "http://127.0.0.1:8077"))
    parser.add_argument("--memory", default="toy/conductor")
    parser.add_argument("--sandboxes", type=Path, default=Path("/sandboxes"))
    parser.add_argument("--conversations", type=int, default=5, help="how many; 0: until told to stop")
    parser.add_argument("--pause", type=float, default=1.0, metavar="SECONDS", help="between two of them")
    args = parser.parse_args()

    sidecar = Sidecar(args.url, args.memory)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Told to stop, it ends the conversation it is in, export included.
        signal.signal(number, lambda *_: stopping.set())
    before, done = None, 0
    try:
        while not stopping.is_set() and (not args.conversations or done < args.conversations):
            remembered = converse(sidecar, args.sandboxes)
            if before is not None and remembered != before + 1:
                raise Refused(f"{before} conversations were remembered, and one later {remembered}.")
            before, done = remembered, done + 1
            if done != args.conversations:
                stopping.wait(args.pause)
    except (Refused, TimeoutError) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
