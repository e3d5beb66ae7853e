"""``python -m emulators e2b|daytona``: one emulator with one sandbox, until Ctrl-C."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import threading
from importlib.util import find_spec

from emulators import DaytonaEmulator, E2BEmulator


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m emulators", description=__doc__)
    parser.add_argument("provider", choices=["e2b", "daytona"])
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: any free one)")
    parser.add_argument("--key", help="API key to ask for (default: a new one)")
    asked = parser.parse_args()

    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    kind = E2BEmulator if asked.provider == "e2b" else DaytonaEmulator
    with kind(port=asked.port, key=asked.key) as server:
        sandbox = server.create(timeout=86400) if isinstance(server, E2BEmulator) else server.create(auto_stop=0)
        for name, value in server.environment().items():
            print(f"export {name}={shlex.quote(value)}")
        print(f"\n# Its home is {sandbox.home}. In another terminal, with the lines above:")
        if find_spec(asked.provider) is None:
            print(f"pip install 'memory-sidecar[{asked.provider}]'  # its SDK, which is not installed yet")
        print(f"memory-sidecar demo --home {shlex.quote(str(sandbox.home))}  # a sample memory in it")
        print(f"memory-sidecar export sample --sandbox {asked.provider}:{sandbox.id}")
        print("\n# Serving until Ctrl-C.", file=sys.stderr)
        sys.stdout.flush()
        done.wait()


if __name__ == "__main__":
    main()
