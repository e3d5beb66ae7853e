"""Real S3 servers on loopback, each a context manager that starts one, waits until it works, and always ends it.

``seaweedfs`` honours conditional writes and checks signatures; ``moto`` is quick but believes anything; ``rclone``
answers 200 to every conditional write, which is what the store's probe must notice. ``minio``, ``versitygw`` and
``s3proxy`` are made or fetched when first asked for, which takes minutes: they are for ``make servers``.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_READY_WITHIN = 40.0
_STARTS = 3
_MADE = Path(__file__).parents[2] / ".cache" / "servers"
_MADE_WITHIN = 1200
_COUNTED = re.compile(r'^SeaweedFS_s3_request_total{.*type="(\w+)"} (\S+)$', re.MULTILINE)


class CannotStart(Exception):
    """A server is not installed or did not become ready; the message says why."""


@dataclass(frozen=True)
class S3Server:
    """A running server and the credentials it accepts."""

    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)
    metrics: str = ""
    """Where it tells what it was asked."""

    def count_requests(self) -> Counter[str]:
        """How often it was asked for what, by its own count. Of a server that tells (``seaweedfs``)."""
        counted: Counter[str] = Counter()
        with urllib.request.urlopen(self.metrics, timeout=10) as answer:
            for kind, number in _COUNTED.findall(answer.read().decode()):
                counted[kind] += int(float(number))
        return counted

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
            s3, master, volume, filer, metrics = ports
            return [
                *(_program("weed"), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                *("-s3", f"-s3.port={s3}", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
                *(f"-master.port={master}", "-master.volumeSizeLimitMB=256", "-master.telemetry=false"),
                # Every bucket takes volumes of its own; the default of 8 is gone after the first.
                *(f"-volume.port={volume}", "-volume.max=500", f"-filer.port={filer}"),
                f"-metricsPort={metrics}",
            ]

        with _running(command, 5, folder, "weed-access", "weed-secret") as server:
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
def minio() -> Iterator[S3Server]:
    """MinIO, made from its source. Raise ``CannotStart`` where there is no Go, or it is not ready."""
    program = _made_with_go("minio", "github.com/minio/minio@v0.0.0-20250907161309-07c3a429bfed")
    with _folder("minio") as folder:

        def command(ports: list[int]) -> list[str]:
            s3, console = (f"127.0.0.1:{port}" for port in ports)
            return [program, "server", str(folder / "data"), f"--address={s3}", f"--console-address={console}"]

        environment = {"MINIO_ROOT_USER": "minio-access", "MINIO_ROOT_PASSWORD": "minio-secret", "MINIO_UPDATE": "off"}
        with _running(command, 2, folder, "minio-access", "minio-secret", environment) as server:
            yield server


@contextmanager
def versitygw() -> Iterator[S3Server]:
    """versitygw over a folder, made from its source. Raise ``CannotStart`` where there is no Go, or it is not ready."""
    program = _made_with_go("versitygw", "github.com/versity/versitygw/cmd/versitygw@v1.8.0")
    with _folder("versitygw") as folder:
        data = folder / "data"
        data.mkdir()

        def command(ports: list[int]) -> list[str]:
            return [program, f"--port=127.0.0.1:{ports[0]}", "posix", str(data)]

        environment = {"ROOT_ACCESS_KEY_ID": "versity-access", "ROOT_SECRET_ACCESS_KEY": "versity-secret"}
        with _running(command, 1, folder, "versity-access", "versity-secret", environment) as server:
            yield server


@contextmanager
def s3proxy() -> Iterator[S3Server]:
    """s3proxy over a folder: compares and then writes. Raise ``CannotStart`` where there is no Java or Maven."""
    java, archive = _program("java"), _fetched_with_maven("org.gaul:s3proxy:4.1.0:jar:jar-with-dependencies")
    with _folder("s3proxy") as folder:
        data, settings = folder / "data", folder / "s3proxy.conf"
        data.mkdir()

        def command(ports: list[int]) -> list[str]:
            told = {
                "s3proxy.endpoint": f"http://127.0.0.1:{ports[0]}",
                "s3proxy.authorization": "aws-v2-or-v4",
                "s3proxy.identity": "proxy-access",
                "s3proxy.credential": "proxy-secret",
                "jclouds.provider": "filesystem",
                "jclouds.filesystem.basedir": str(data),
            }
            settings.write_text("".join(f"{name}={value}\n" for name, value in told.items()))
            return [java, "-Xmx256m", "-jar", str(archive), "--properties", str(settings)]

        with _running(command, 1, folder, "proxy-access", "proxy-secret") as server:
            yield server


def _made_with_go(name: str, source: str) -> str:
    """A program made from a module of exactly one version, once; in a cache folder of this project."""
    program = _MADE / source.replace("/", "-") / name
    if not program.is_file():
        environment = {**os.environ, "GOBIN": str(program.parent), "GOFLAGS": "-buildvcs=false"}
        _make([_program("go"), "install", source], environment)
    return str(program)


def _fetched_with_maven(artifact: str) -> Path:
    folder = _MADE / artifact.replace(":", "-")
    if not folder.is_dir():
        plugin = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"
        fetch = [_program("mvn"), "-q", "-B", plugin, f"-Dartifact={artifact}", f"-DoutputDirectory={folder}"]
        _make(fetch, dict(os.environ))
    return next(folder.glob("*.jar"))


def _make(command: list[str], environment: dict[str, str]) -> None:
    try:
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=_MADE_WITHIN)
    except subprocess.TimeoutExpired:
        raise CannotStart(f"{' '.join(command)} took more than {_MADE_WITHIN} s") from None
    except subprocess.CalledProcessError as problem:
        raise CannotStart(f"{' '.join(command)} failed: {problem.stderr[-400:]}") from None


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


@contextmanager
def comparing_first() -> Iterator[S3Server]:
    """A server that compares and then writes, as s3proxy does over a file system: two requests of one moment both pass."""
    kept: dict[str, bytes] = {}

    class Compare(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            key = urlsplit(self.path).path
            if "list-type" in self.path:
                rows = "".join(f"<Contents><Key>{one[8:]}</Key></Contents>" for one in kept)
                self._answer(200, f"<ListBucketResult><Name>b</Name>{rows}</ListBucketResult>".encode())
            elif key in kept:
                self._answer(200, kept[key], _etag(kept[key]))
            else:
                self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

        def do_PUT(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            there, key = kept.get(self.path), self.path
            wanted = self.headers.get("If-Match")
            holds = there is not None and wanted == _etag(there) if wanted else there is None
            if not holds and (wanted or self.headers.get("If-None-Match")):
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            time.sleep(random.random() / 100)
            kept[key] = data
            self._answer(200, b"", _etag(data))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            kept.clear()
            self._answer(200, b"<DeleteResult/>")

        def _answer(self, status: int, body: bytes, etag: str = '"0"') -> None:
            self.send_response(status)
            self.send_header("ETag", etag)
            self.send_header("Last-Modified", formatdate(usegmt=True))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Compare)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield S3Server(f"http://127.0.0.1:{server.server_address[1]}", "any-access", "any-secret")
    finally:
        server.shutdown()
        server.server_close()


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def free_port() -> int:
    """A port below 20000 that is free together with the one 10000 above it, where SeaweedFS puts its gRPC."""
    for _ in range(200):
        port = random.SystemRandom().randrange(10_000, 20_000)
        if _is_free(port) and _is_free(port + 10_000):
            return port
    raise CannotStart("no free port between 10000 and 20000")


@contextmanager
def _running(
    command: Callable[[list[int]], list[str]],
    ports: int,
    folder: Path,
    access_key: str,
    secret_key: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[S3Server]:
    """Start the process and wait until it keeps an object; another try gets other ports, if one was just taken."""
    log = folder / "log"
    for _ in range(_STARTS):
        chosen = [free_port() for _ in range(ports)]
        metrics = f"http://127.0.0.1:{chosen[-1]}/metrics"
        server = S3Server(f"http://127.0.0.1:{chosen[0]}", access_key, secret_key, metrics)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(chosen),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                env={**os.environ, **(environment or {})},
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
