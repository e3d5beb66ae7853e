"""Parts that many tests share. Each starts when a test first asks for it and is stopped when the run ends.

A part that cannot be had on this machine skips the test with the reason; where ``CI`` is set it fails instead.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from adapters.sandboxes import local
from tests.parts import forked_sidecar, memories
from tests.parts.earlier_services import earlier_service
from tests.parts.fault_table import table_of
from tests.parts.forked_command import ForkedCommand
from tests.parts.leaks import leaked
from tests.parts.mounts import CannotMount, bound, tmpfs
from tests.parts.postgres import Database, Server, postgres
from tests.parts.providers import EMULATORS, Emulator, Provider, cleaned, provider_variables
from tests.parts.s3_servers import CannotStart, S3Server, minio, moto, rclone, s3proxy, seaweedfs, versitygw
from tests.parts.services import Service
from tests.parts.supabase import supabase

T = TypeVar("T")
Mount = Callable[..., Path]
Name = memories.Name
Open = Callable[[Name], memories.Provider]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-table", action="store_true", help="print what came of each injected fault")
    parser.addoption("--outage", type=float, default=0, metavar="MINUTES", help="how long Postgres stays away")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any]:
    """A test whose output or log shows a credential has failed, whatever it asserts."""
    report = (yield).get_result()
    if leaked([report.longreprtext, *(text for _, text in report.sections)]):
        report.outcome, report.longrepr = "failed", f"{item.nodeid} showed a credential in its output or log"
        report.sections = []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--fault-table"):
        return
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    rows = [value for report in reports for name, value in report.user_properties if name == "fault"]
    terminalreporter.section("what came of each fault")
    for line in table_of(rows):
        terminalreporter.line(line)


@pytest.fixture(scope="session")
def weed() -> Iterator[S3Server]:
    """SeaweedFS: honours conditions, checks signatures, keeps versions."""
    yield from _started(seaweedfs())


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    """moto: quick, believes any credentials."""
    yield from _started(moto())


@pytest.fixture(scope="session")
def supabase_server(moto_server: S3Server) -> Iterator[S3Server]:
    """Before moto: speaks S3 as Supabase Storage does."""
    yield from _started(supabase(moto_server))


@pytest.fixture(scope="session")
def minio_server() -> Iterator[S3Server]:
    yield from _started(minio())


@pytest.fixture(scope="session")
def versitygw_server() -> Iterator[S3Server]:
    yield from _started(versitygw())


@pytest.fixture(scope="session")
def s3proxy_server() -> Iterator[S3Server]:
    """s3proxy: compares and then writes."""
    yield from _started(s3proxy())


@pytest.fixture(scope="session")
def rclone_server() -> Iterator[S3Server]:
    """rclone: ignores conditional writes."""
    yield from _started(rclone())


@pytest.fixture
def credentials_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[S3Server], None]:
    """Call it to become a client of that server, for this test, with nothing of the machine's own AWS settings."""

    def become(server: S3Server) -> None:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)

    return become


@pytest.fixture(autouse=True)
def forget_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds the credentials or settings of whoever runs it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No service or client of the tests keeps or finds a token or a cache in the home of whoever runs them."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "shared"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


@pytest.fixture(autouse=True)
def forget_tokens(own_state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds a token that another one has kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(own_state / secrets.token_hex(8)))


@pytest.fixture(autouse=True)
def forget_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reaches the account of whoever runs it."""
    for name in provider_variables():
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def forget_postgres(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes to the database of whoever runs it."""
    monkeypatch.delenv("MEMORY_SIDECAR_POSTGRES", raising=False)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """A real Postgres for the whole run."""
    yield from _started(postgres())


@pytest.fixture
def database(postgres_server: Server, forget_postgres: None, monkeypatch: pytest.MonkeyPatch) -> Database:
    """A database of this test's own; commands and services that are started find it."""
    made = postgres_server.database()
    monkeypatch.setenv("MEMORY_SIDECAR_POSTGRES", made.url)
    return made


@pytest.fixture
def outage(request: pytest.FixtureRequest) -> float:
    """For how many seconds Postgres is to stay away."""
    return 60 * float(request.config.getoption("--outage"))


@pytest.fixture(scope="session")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Service]]:
    """A service of the version before there were conversations."""
    yield from _started(earlier_service(tmp_path_factory.mktemp("earlier")))


@pytest.fixture(scope="session")
def emulators() -> Iterator[Callable[[str], Emulator]]:
    """Call it with ``e2b`` or ``daytona``: one server of each kind for the whole run."""
    with ExitStack() as running:
        yield functools.cache(lambda name: running.enter_context(EMULATORS[name]()))  # type: ignore[misc]


@pytest.fixture
def provider_of(
    emulators: Callable[[str], Emulator],
    forget_providers: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Callable[[str], Provider]]:
    """Call it with ``local``, ``e2b`` or ``daytona`` to become a client of that provider, for this test."""
    used = []

    def become(name: str) -> Provider:
        if name == "local":
            return Provider(name, base=tmp_path)
        server = emulators(name)
        cleaned(server)
        used.append(server)
        for variable, value in server.environment().items():
            monkeypatch.setenv(variable, value)
        return Provider(name, base=tmp_path, server=server)

    yield become
    for server in used:
        cleaned(server)


@pytest.fixture
def open_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Call it with a provider's name; its SDK then talks to that one, for this test."""
    with ExitStack() as providers:

        def opened(name: Name) -> memories.Provider:
            provider = providers.enter_context(memories.provider_named(name, tmp_path / "provider"))
            for variable, value in (provider.emulator.environment() if provider.emulator else {}).items():
                monkeypatch.setenv(variable, value)
            return provider

        yield opened


@pytest.fixture(scope="module")
def forked_programs() -> Iterator[None]:
    """In local sandboxes of these tests, and of the services and commands that they start, the program is forked from a
    process that has it loaded. For tests that are about what it does, and not about its process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forked_sidecar, "programs_are_forked", True)
        patch.setattr(local, "Command", ForkedCommand)
        yield


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Call it with ``tmpfs`` or ``bound`` arguments: ``mount(folder, size="1m")``, ``mount(source, folder)``."""
    with ExitStack() as mounts:

        def mounted(*paths: Path, **options: object) -> Path:
            how = bound if len(paths) == 2 else tmpfs
            return _entered(mounts, how(*paths, **options))  # type: ignore[arg-type]

        yield mounted


def _started(part: AbstractContextManager[T]) -> Iterator[T]:
    with ExitStack() as parts:
        yield _entered(parts, part)


def _entered(parts: ExitStack, part: AbstractContextManager[T]) -> T:
    try:
        return parts.enter_context(part)
    except (CannotStart, CannotMount) as reason:
        if os.environ.get("CI"):
            pytest.fail(f"a part that CI must have is missing: {reason}")
        pytest.skip(str(reason))
