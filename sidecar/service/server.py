"""Run the service: start everything, serve, and stop in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import httpx
import structlog
import uvicorn

from sidecar.audit.settings import Audit
from sidecar.audit.trail import Trail, open_trail
from sidecar.engine import Engine
from sidecar.host.local_token import find_token_path
from sidecar.host.values import dataclass
from sidecar.service.api.app import make_app
from sidecar.service.attachments.attachment import Attachment
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.door.connections import Connection, ConnectionLimits, Listener, limit_connections
from sidecar.service.door.door import Hosts
from sidecar.service.jobs.adoption import AdoptionJob
from sidecar.service.jobs.drills import DrillJob
from sidecar.service.jobs.index import IndexMetrics, IndexUpdater
from sidecar.service.jobs.retention import RetentionJob
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.jobs.tokens import TokenJob
from sidecar.service.jobs.wanted_sandboxes import WantedJob
from sidecar.service.jobs.webhooks import Deliveries
from sidecar.service.logs import configure_logs
from sidecar.service.operations import Operation
from sidecar.service.readiness import StartChecks
from sidecar.service.settings import Service, Start, Watch, Webhook
from sidecar.service.starts import Starts
from sidecar.service.watch.watch import Watcher

DELIVERY_SECONDS = 3.0
HEADS_SECONDS = 600.0
"""How often the store is listed, to see what other services have stored."""
LISTED_PER_SECOND = 200
"""A store with more objects is listed so rarely that it is asked for a page every five seconds at most."""
UNSAVED = 1
HURRIED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """The parts of the config that a service works with, beside its engine's."""

    service: Service
    webhooks: Sequence[Webhook] = ()
    audit: Audit = Audit()
    index_every: float = 300.0
    """Seconds between two looks at whether the search index is up to date."""
    adopt: str = ""
    """The folder with backups to adopt."""
    start: Sequence[Start] = ()
    """The memories that are to have a living sandbox."""
    watch: Sequence[Watch] = ()
    """Where sandboxes are noticed that name their memory."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What a service is told from outside."""

    stop: asyncio.Event
    hurry: asyncio.Event
    """Set it after ``stop``, to give up what is not finished."""


async def serve(
    engine: Engine,
    config: ServiceConfig,
    *,
    ready: Callable[[str], None] = lambda url: None,
    orders: Orders | None = None,
    beside: bool = False,
) -> int:
    """Serve until told to stop, and after that to hurry: by ``orders``, else by signals. ``ready`` is called with the
    address once it listens.

    ``beside``: it runs beside a command that owns the terminal, and whose conversations have ended when it is told to
    stop. Return the exit code: 0, or 1 if something was not finished in time or is not saved, or 130 if hurried.
    """
    settings = config.service
    configure_logs(settings.log, beside=beside)
    log = structlog.get_logger("sidecar")
    found = StartChecks(engine, settings)
    for step in found.steps:
        await step()
    host, callers, tls, listener = found.host, found.callers, found.tls, found.listener
    assert listener is not None
    trail = open_trail(config.audit, engine.repository.store, lambda told: log.info("audit", **told))
    await trail.open()
    await trail.write()
    sidecar = Sidecar(engine, settings, trail)
    deliveries = _start_deliveries(sidecar, config.webhooks)
    jobs = Jobs()
    keeper = Keeper(sidecar, jobs, shares=not beside)
    await keeper.start()
    keep_audit = config.audit.keep_seconds if config.audit.store else 0.0
    RetentionJob(sidecar, jobs, keep_audit=keep_audit).start()
    DrillJob(sidecar, jobs).start()
    TokenJob(sidecar, keeper, callers, jobs).start()
    AdoptionJob(keeper, sidecar, jobs, config.adopt).start()
    starts = Starts(sidecar, keeper)
    starts.look_regularly(jobs)
    WantedJob(starts, keeper, sidecar, jobs, config.start).start()
    Watcher(starts, keeper, sidecar, jobs, config.watch).start()
    _look_at_heads_regularly(sidecar, jobs)
    jobs.start()
    indexing = _start_indexing(sidecar, config.index_every)
    scheme = "http" if tls is None else "https"
    url = f"{scheme}://{host if ':' not in host else f'[{host}]'}:{listener.getsockname()[1]}"
    app = make_app(sidecar, keeper, callers, Hosts(settings.hosts, host))
    server = _Server(app, _compute_limits(settings, log), tls)
    orders = orders or _watch_signals()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await _wait_for_first(serving, server.listening.wait())
    log.info("serving", address=url, store=engine.repository.store.url, open_to_all=callers.open_to_all)
    if found.kept:
        log.info("callers on this machine need the token that is kept for this user", file=str(find_token_path()))
    if callers.names:
        log.info("named tokens are accepted", names=callers.names)
    if callers.open_to_all:
        log.warning("no token is set: anybody on this machine may call; only loopback is listened on")
    ready(url)
    await _wait_for_first(serving, orders.stop.wait())
    left = await _stop_in_order(sidecar, keeper, orders.hurry, with_callers=beside)
    closing: list[Deliveries | IndexUpdater] = [*deliveries, *indexing]
    await asyncio.gather(*(one.close(DELIVERY_SECONDS) for one in closing))
    server.should_exit = True
    server.force_exit = orders.hurry.is_set()
    await asyncio.wait({serving}, timeout=5)
    await _close_trail(trail)
    return HURRIED if orders.hurry.is_set() else UNSAVED if left else 0


def _look_at_heads_regularly(sidecar: Sidecar, jobs: Jobs) -> None:
    """Look at all heads now, and then as often as the size of the store allows."""

    async def look() -> None:
        pause = HEADS_SECONDS
        try:
            pause = max(pause, await sidecar.look_at_heads() / LISTED_PER_SECOND)
        finally:
            jobs.run_once("look at heads", pause, look)

    jobs.run_once("look at heads", 0, look)


async def _close_trail(trail: Trail) -> None:
    """End the audit of this service, within ``DELIVERY_SECONDS``."""
    log = structlog.get_logger("sidecar")
    try:
        async with asyncio.timeout(DELIVERY_SECONDS):
            problem = await trail.close()
    except TimeoutError:
        log.critical("lines of the audit may be lost: the place they are kept in does not answer")
    else:
        if problem is not None:
            log.critical("lines of the audit are lost", **problem.as_dict())


def _compute_limits(settings: Service, log: structlog.BoundLogger) -> ConnectionLimits:
    connections = limit_connections(settings.connections)
    if connections < settings.connections:
        log.warning("fewer connections than wanted: the limit of open files is low", connections=connections)
    return ConnectionLimits(connections=connections, head=settings.header_timeout, body=settings.body_timeout)


def _start_deliveries(sidecar: Sidecar, webhooks: Sequence[Webhook]) -> list[Deliveries]:
    if not webhooks:
        return []
    client = httpx.AsyncClient(timeout=10, follow_redirects=False)
    store = sidecar.engine.repository.store
    deliveries = [Deliveries(hook, os.environ.get(hook.secret_env, ""), client, store) for hook in webhooks]
    for one in deliveries:
        sidecar.events.subscribe(one.take)
    return deliveries


def _start_indexing(sidecar: Sidecar, every: float) -> list[IndexUpdater]:
    """Start the updater of the search index, if a search database is configured."""
    if sidecar.engine.index is None:
        return []
    indexing = IndexUpdater(sidecar.engine.index, sidecar.events, IndexMetrics(sidecar.metrics.registry), every)
    indexing.start()
    return [indexing]


async def _stop_in_order(sidecar: Sidecar, keeper: Keeper, hurried: asyncio.Event, *, with_callers: bool) -> bool:
    """Accept no more, finish what runs, save what is attached. Return whether something is unfinished or not saved.

    ``with_callers``: attachments that were not begun through this service do not count, since its callers are not
    responsible for them.
    """
    log, grace = structlog.get_logger("sidecar"), sidecar.settings.grace
    sidecar.operations.stop()
    log.info("stopping", running=sidecar.operations.running, waiting=sidecar.operations.waiting, grace=grace)
    ending = asyncio.ensure_future(_finish(sidecar, keeper, grace, with_callers=with_callers))
    await _wait_for_first(ending, hurried.wait())
    operations, attachments = (
        ending.result() if ending.done() else (sidecar.operations.unfinished(), keeper.looked_after)
    )
    for operation in operations:
        about = {"memory": operation.memory, "sandbox": operation.sandbox}
        log.error("not finished", operation=operation.id, kind=operation.kind, **about)
        sidecar.events.publish("service.unfinished", operation=operation.id, verb=operation.kind, **about)
    ours = []
    for attachment in attachments:
        about = {"memory": attachment.memory, "sandbox": attachment.sandbox}
        how = {"state": attachment.state, "problem": attachment.problem, "last_saved": attachment.saved}
        if with_callers and not keeper.has_begun(attachment):
            log.warning("not saved, and not begun here", conversation=attachment.conversation, **how, **about)
            continue
        ours.append(attachment)
        what = "not saved: kept, and waits for a review" if attachment.is_pending else "not saved"
        log.error(what, conversation=attachment.conversation, **how, **about)
        sidecar.events.publish("attachment.unsaved", conversation=attachment.conversation, **how, **about)
    return bool(operations or ours)


async def _finish(
    sidecar: Sidecar, keeper: Keeper, grace: float, *, with_callers: bool
) -> tuple[list[Operation], list[Attachment]]:
    """Save the attachments and wait for the operations, both within ``grace``. Return what is left of each."""
    deadline = time.monotonic() + grace
    unsaved = await keeper.stop(grace, with_callers=with_callers)
    return await sidecar.operations.drain(deadline - time.monotonic()), unsaved


class _Server(uvicorn.Server):
    """uvicorn's server with the sidecar's own listener and without signal handling."""

    def __init__(self, app: Any, allowance: ConnectionLimits, tls: ssl.SSLContext | None) -> None:
        config = uvicorn.Config(
            app, http="h11", ws="none", log_config=None, access_log=False, lifespan="on", server_header=False
        )
        super().__init__(config)
        self._allowance = allowance
        self._tls = tls
        self._listeners: list[Listener] = []
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn starts without sockets: ``Listener`` accepts the connections, with limits that uvicorn does not have.
        await super().startup(sockets=[])
        self._listeners = [Listener(one, self._make_connection, self._allowance, self._tls) for one in sockets or ()]
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self._listeners:
            listener.close()
        await super().shutdown()

    def _make_connection(self, listener: Listener) -> Connection:
        return Connection(listener, self)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone; ``serve`` handles them."""
        yield


async def _wait_for_first(task: asyncio.Future[Any], other: Coroutine[Any, Any, Any]) -> None:
    """Wait until the task is done or the other coroutine has returned."""
    waiting = asyncio.ensure_future(other)
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def _watch_signals() -> Orders:
    """Return orders that signals give: the first SIGTERM or SIGINT to stop, the second to hurry."""
    orders = Orders(asyncio.Event(), asyncio.Event())

    def on_signal() -> None:
        (orders.hurry if orders.stop.is_set() else orders.stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return orders
