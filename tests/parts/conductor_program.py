"""A conductor as a program of its own: it holds one conversation until it is told, on its stdin, that it is over."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from sidecar.client import Client


def _main(memory: str, sandbox: str, conversation: str) -> None:
    client = Client()
    with client.conversation(memory, sandbox=sandbox, conversation=conversation, checkpoint_every=3600) as course:
        print(json.dumps(asdict(course.restored)), flush=True)
        sys.stdin.readline()
    assert course.exported is not None
    print(json.dumps(asdict(course.exported)), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
