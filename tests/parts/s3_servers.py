"""Real S3 servers on loopback, each a context manager that starts one, waits until it works, and always ends it.

``seaweedfs`` honours conditional writes and checks signatures; ``moto`` is quick but believes anything; ``rclone``
answers 200 to every conditional write, which is what the store's probe must notice.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

_READY_WITHIN = 40.0
_STARTS = 3


class CannotStart(Exception):
    """A server is not installed or did not become ready; the message says why."""


@dataclass(frozen=True)
class S3Server:
    """A running server and the credentials it accepts."""

    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)

    @cached_property
    def client(self) -> Any:
        import boto3
        from botocore.config import Config

        session = boto3.Session(
            aws_access_key_id=self.access_key, aws_secret_access_key=self.secret_key, region_name="us-east-1"
        )
        config = Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            connect_timeout=2,
            read_timeout=20,
            retries={"mode": "standard", "total_max_attempts": 2},
        )
        return session.client("s3", endpoint_url=self.endpoint, config=config)

    def make_bucket(self, name: str) -> str:
        self.client.create_bucket(Bucket=name)
        return name

    def environment(self) -> dict[str, str]:
        """What a process needs to reach this server, and nothing of the machine's own AWS configuration."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }


@contextmanager
def seaweedfs() -> Iterator[S3Server]:
    """SeaweedFS, all its roles in one process. Raise ``CannotStart`` when it is not installed or not ready in time."""
    with _folder("weed") as folder:
        config = folder / "s3.json"
        credentials = {"accessKey": "weed-access", "secretKey": "weed-secret"}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "tests", "credentials": [credentials], "actions": actions}
        config.write_text(json.dumps({"identities": [identity]}))

        def command(ports: list[int]) -> list[str]:
            s3, master, volume, filer = ports
            return [
                *(_program("weed"), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                *("-s3", f"-s3.port={s3}", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
                *(f"-master.port={master}", "-master.volumeSizeLimitMB=256", "-master.telemetry=false"),
                # Every bucket takes volumes of its own; the default of 8 is gone after the first.
                *(f"-volume.port={volume}", "-volume.max=500", f"-filer.port={filer}"),
            ]

        with _running(command, 4, folder, "weed-access", "weed-secret") as server:
            yield server


@contextmanager
def rclone() -> Iterator[S3Server]:
    """``rclone serve s3`` over a folder. Raise ``CannotStart`` when it is not installed or not ready in time."""
    with _folder("rclone") as folder:
        data = folder / "data"
        data.mkdir()

        def command(ports: list[int]) -> list[str]:
            return [
                *(_program("rclone"), "serve", "s3", str(data), f"--addr=127.0.0.1:{ports[0]}"),
                *("--auth-key=rclone-access,rclone-secret", f"--config={folder / 'rclone.conf'}"),
                *("--vfs-cache-mode=off", f"--cache-dir={folder / 'cache'}"),
            ]

        with _running(command, 1, folder, "rclone-access", "rclone-secret") as server:
            yield server


@contextmanager
def moto() -> Iterator[S3Server]:
    """moto's server, in a thread of this process."""
    from moto.server import ThreadedMotoServer

    # It writes down every request it gets, signed links included.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        yield S3Server(f"http://127.0.0.1:{port}", "moto-access", "moto-secret")
    finally:
        server.stop()


def free_port() -> int:
    """A port below 20000 that is free together with the one 10000 above it, where SeaweedFS puts its gRPC."""
    for _ in range(200):
        port = random.SystemRandom().randrange(10_000, 20_000)
        if _is_free(port) and _is_free(port + 10_000):
            return port
    raise CannotStart("no free port between 10000 and 20000")


@contextmanager
def _running(
    command: Callable[[list[int]], list[str]], ports: int, folder: Path, access_key: str, secret_key: str
) -> Iterator[S3Server]:
    """Start the process and wait until it keeps an object; another try gets other ports, if one was just taken."""
    log = folder / "log"
    for _ in range(_STARTS):
        chosen = [free_port() for _ in range(ports)]
        server = S3Server(f"http://127.0.0.1:{chosen[0]}", access_key, secret_key)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(chosen),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                preexec_fn=_die_with_us,
            )
        try:
            if _becomes_ready(server, process):
                yield server
                return
        finally:
            process.kill()
            process.wait()
    raise CannotStart(f"{command([0] * ports)[0]} was not ready in {_READY_WITHIN:.0f} s: {_tail(log)}")


def _becomes_ready(server: S3Server, process: subprocess.Popen[bytes]) -> bool:
    client = server.client
    deadline = time.monotonic() + _READY_WITHIN
    while time.monotonic() < deadline and process.poll() is None:
        try:
            client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="ready", Body=b"")
        except Exception:
            time.sleep(0.1)
        else:
            return True
    return False


def _die_with_us() -> None:
    """Between fork and exec: a test run killed outright leaves no server behind (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@contextmanager
def _folder(name: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"sidecar-{name}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _program(name: str) -> str:
    beside_python = Path(sys.executable).parent / name
    found = str(beside_python) if beside_python.is_file() else shutil.which(name)
    if not found:
        raise CannotStart(f"{name} is not installed")
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-600:]
