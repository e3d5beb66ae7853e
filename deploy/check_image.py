"""Check what the image promises, in containers without a network, without privileges, on a read-only file system.

    python deploy/check_image.py [--nested]

It refuses to start without a volume or a token; the demo runs; the service answers its health check; the toy conductor
remembers, also after the service was stopped and another one started on the same volume; and stopping takes seconds.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine import Engine

ROOT = Path(__file__).resolve().parent.parent
LOCKED_DOWN = (
    "--network=none",
    "--read-only",
    "--tmpfs=/tmp:rw,mode=1777,size=512m",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
)
STARTS_WITHIN = 20.0
STOPS_WITHIN = 30


def expect(holds: bool, promise: str, told: str = "") -> None:
    print(f"{'ok ' if holds else 'NOT'}  {promise}", flush=True)
    if not holds:
        sys.exit(told or 1)


class Image:
    def __init__(self, engine: Engine, tag: str) -> None:
        self._engine = engine
        self._tag = tag
        self._name = f"memory-sidecar-check-{secrets.token_hex(4)}"
        self._token = secrets.token_hex(32)
        self._volumes = {"/data": f"{self._name}-data", "/sandboxes": f"{self._name}-sandboxes"}

    def check_user(self) -> None:
        said = self._once("--entrypoint=sh", command=("-c", "id -u; touch /anything /opt/sidecar/x 2>&1; true"))
        expect(said.startswith("10001\n"), "it runs as uid 10001", said)
        expect(said.count("Read-only file system") == 2, "its file system is read-only", said)

    def check_refusals(self) -> None:
        told = self._engine.run("--rm", *LOCKED_DOWN, self._tag)
        expect(told.returncode == 2 and "MEMORY_SIDECAR_TOKEN" in told.stderr, "no token, no service", told.stderr)
        told = self._engine.run("--rm", *LOCKED_DOWN, "--env", f"MEMORY_SIDECAR_TOKEN={self._token}", self._tag)
        expect(told.returncode == 1 and "No volume is mounted" in told.stderr, "no volume, no service", told.stderr)

    def check_demo(self) -> None:
        said = self._once(command=("demo",))
        expect("SQLite's integrity check: ok" in said, "the demo runs", said)

    def check_service(self) -> None:
        try:
            with self._serving():
                said = self._converse(3)
                expect("3 conversations remembered" in said, "the toy conductor remembers three conversations", said)
            with self._serving():
                said = self._converse(1)
                expect("4 conversations remembered" in said, "and a fourth, with another service on the volume", said)
        finally:
            self._engine.ask("rm", "--force", self._name)
            self._engine.ask("volume", "rm", "--force", *self._volumes.values())

    def _once(self, *options: str, command: tuple[str, ...]) -> str:
        done = self._engine.run("--rm", *LOCKED_DOWN, *options, self._tag, *command)
        if done.returncode:
            expect(False, f"{' '.join(command)} ends well", done.stdout + done.stderr)
        return done.stdout

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """The service by the image's own command, until it was stopped in good order."""
        volumes = [f"--volume={name}:{path}" for path, name in self._volumes.items()]
        conductor = f"--volume={ROOT}/deploy/conductor/conductor.py:/conductor.py:ro"
        token = f"--env=MEMORY_SIDECAR_TOKEN={self._token}"
        begun = time.monotonic()
        started = self._engine.run(
            "--detach", "--name", self._name, *LOCKED_DOWN, *volumes, conductor, token, self._tag
        )
        if started.returncode:
            expect(False, "the service starts", started.stderr)
        health = self._health_command()
        while self._engine.ask("exec", self._name, *health).returncode:
            if time.monotonic() > begun + STARTS_WITHIN:
                expect(False, "its health check passes", self._engine.ask("logs", self._name).stderr)
            time.sleep(0.2)
        expect(True, f"its health check passes {time.monotonic() - begun:.1f} s after the start")
        yield
        begun = time.monotonic()
        self._engine.tell("stop", "--time", str(STOPS_WITHIN + 5), self._name)
        took = time.monotonic() - begun
        code = json.loads(self._engine.tell("inspect", self._name))[0]["State"]["ExitCode"]
        expect(code == 0 and took < STOPS_WITHIN, f"told to stop, it ends with exit code {code} in {took:.1f} s")
        self._engine.tell("rm", self._name)

    def _health_command(self) -> list[str]:
        about = json.loads(self._engine.tell("image", "inspect", self._tag))[0]
        check = about["Config"].get("Healthcheck") or about.get("Healthcheck") or {}  # docker's place, podman's
        if check.get("Test", [""])[0] != "CMD":
            expect(False, "it has a health check")
        return list(check["Test"][1:])

    def _converse(self, times: int) -> str:
        words = ("/conductor.py", "--conversations", str(times), "--pause", "0")
        done = self._engine.ask("exec", self._name, "python", *words)
        if done.returncode:
            expect(False, "the toy conductor ends well", done.stdout + done.stderr)
        return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the image.")
    parser.add_argument("--tag", default="memory-sidecar:local")
    parser.add_argument("--nested", action="store_true", help="this machine is a container itself")
    args = parser.parse_args()
    image = Image(Engine(nested=args.nested), args.tag)
    image.check_user()
    image.check_refusals()
    image.check_demo()
    image.check_service()


if __name__ == "__main__":
    main()
