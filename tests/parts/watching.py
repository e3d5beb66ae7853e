"""Services that watch an emulated provider, and a conductor that only creates sandboxes there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from emulators.webhooks import Webhooks
from tests.parts.homes import empty_home, run_cli, write
from tests.parts.providers import Emulated, Provider
from tests.parts.services import Service, serving, until

REMOTE = ("e2b", "daytona")
SIGN = ".cache/memory-sidecar/ready.json"
SECRET = "a-secret-between-provider-and-service"
SECRET_ENV = "WATCH_SECRET"


class Watched:
    """A provider, a store, and services that watch."""

    def __init__(self, tmp_path: Path, provider: Provider) -> None:
        self.provider, self.store, self.base = provider, tmp_path / "store", tmp_path

    def remember(self, memory: str = "conductor", text: str = "lesson 0") -> None:
        home = empty_home(self.base / f"first of {memory.replace('/', '-')}")
        write(home / "MEMORY.md", text.encode())
        assert run_cli("export", memory, f"--sandbox=local:{home}", store=self.store).code == 0

    @contextmanager
    def served(self, log: str = "log", *, lease: float = 2.0, more: str = "", **table: Any) -> Iterator[Service]:
        """A service with one ``[[watch]]``."""
        rows = {"provider": self.provider.name, "memories": ["conductor", "acme/*"], "list_every": 1, **table}
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in rows.items())
        env = {SECRET_ENV: SECRET}
        with serving(self.store, self.base / log, env, more=f"[[watch]]\n{text}{more}", lease=lease) as service:
            yield service

    def hook(self, service: Service, secret: str = SECRET) -> Webhooks:
        """Have the provider tell this service what happens."""
        return self.provider.server.send_webhooks(f"{service.url}/v1/hooks/{self.provider.name}", secret)

    def create(self, **metadata: str) -> Emulated:
        """A new sandbox, as a conductor creates it with the provider's SDK."""
        if self.provider.name == "e2b":
            from e2b import Sandbox

            id = Sandbox.create(metadata=metadata, timeout=900).sandbox_id
        else:
            from daytona import CreateSandboxFromSnapshotParams, Daytona, DaytonaConfig

            client = Daytona(DaytonaConfig(use_deprecated_polling=True))
            id = client.create(CreateSandboxFromSnapshotParams(labels=metadata)).id
        found = self.provider.server.find(id)
        assert found is not None
        return found

    def make(self, **metadata: str) -> Emulated:
        """A new sandbox that nobody asked the provider for by a request."""
        if self.provider.name == "e2b":
            return self.provider.create(metadata=metadata).emulated
        return self.provider.create(labels=metadata).emulated

    def ref(self, sandbox: Emulated) -> str:
        return f"{self.provider.name}:{sandbox.id}"

    def await_sign(self, sandbox: Emulated) -> dict[str, Any]:
        until((sandbox.home / SIGN).exists)
        said: dict[str, Any] = json.loads((sandbox.home / SIGN).read_text())
        return said

    def overview(self, service: Service) -> dict[str, Any]:
        answer: dict[str, Any] = service.http.get("/v1/attachments").json()
        return answer

    def find(self, service: Service, sandbox: Emulated) -> dict[str, Any]:
        """Its attachment, empty if it has none."""
        rows = self.overview(service)["attachments"]
        found: dict[str, Any] = next((row for row in rows if row["sandbox"] == self.ref(sandbox)), {})
        return found

    def await_attached(self, service: Service, sandbox: Emulated) -> dict[str, Any]:
        until(lambda: self.find(service, sandbox).get("state") == "open")
        return self.find(service, sandbox)

    def settle(self, service: Service, count: int = 3) -> None:
        """Wait until the provider was listed a few times more."""
        before = self.provider.server.count("list")
        until(lambda: self.provider.server.count("list") >= before + count)

    def restores(self, *logs: str) -> list[str]:
        """The sandboxes that something was put into, each as often as that was."""
        lines = [json.loads(line) for log in logs for line in (self.base / log).read_text().splitlines() if line]
        return [line["sandbox"] for line in lines if line["event"] == "restore complete" and not line.get("kept")]
