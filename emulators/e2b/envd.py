"""The daemon inside an E2B sandbox, as its clients reach it: who may ask, and which part of it answers."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from emulators.calls import Step
from emulators.e2b import files, filesystem, processes
from emulators.server import Exchange, Refused, Route
from emulators.wire import Request

if TYPE_CHECKING:
    from emulators.e2b.control import E2BEmulator, E2BSandbox

Act = Callable[[Exchange, "E2BSandbox"], None]


def route(server: E2BEmulator, request: Request) -> Route:
    """Where a request for a sandbox's daemon leads; the header ``E2b-Sandbox-Id`` names the sandbox."""
    id = request.header("E2b-Sandbox-Id")
    step, act = _find(server, request)

    def checked(exchange: Exchange) -> None:
        sandbox = server.find(id)
        if sandbox is None or not sandbox.running:
            gone = {"sandboxId": id, "message": "The sandbox was not found", "code": 502}
            raise Refused(502, gone)
        given = exchange.request.header("X-Access-Token")
        if step != "health" and not secrets.compare_digest(given, sandbox.token):
            raise Refused(401, {"code": 401, "message": "unauthorized access, please provide a valid access token"})
        with sandbox.serving(exchange.connection):
            act(exchange, sandbox)

    return Route(step, id or None, checked)


def _find(server: E2BEmulator, request: Request) -> tuple[Step, Act]:
    if request.path == "/health":
        return "health", lambda exchange, sandbox: exchange.empty(204)
    if request.path == "/files" and request.method == "GET":
        return "download", lambda exchange, sandbox: files.download(exchange, sandbox, compress=server.gzip)
    if request.path == "/files" and request.method == "POST":
        return "upload", files.upload
    service, _, method = request.path.strip("/").partition("/")
    if service == "filesystem.Filesystem" and method in filesystem.METHODS:
        return "filesystem", lambda exchange, sandbox: filesystem.answer(exchange, sandbox, method)
    if service == "process.Process" and method in processes.METHODS:
        step, act = processes.METHODS[method]
        return step, act
    return "other", _unknown


def _unknown(exchange: Exchange, sandbox: E2BSandbox) -> None:
    raise Refused(404, {"code": 404, "message": "404 page not found"})
