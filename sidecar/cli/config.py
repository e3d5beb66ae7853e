"""``config check``: whether a service would start with the configuration. ``config options``: every option."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, field, fields, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from sidecar.audit.sinks import check_audit_file
from sidecar.cli.result import Result, Table
from sidecar.config.settings import (
    SECTIONS,
    Config,
    add_location,
    add_store_location,
    build_default_store,
    find_config_file,
    list_unknown_variables,
    load_config,
)
from sidecar.engine import Engine
from sidecar.errors import BadConfig, BadReference, SidecarError
from sidecar.host.field_docs import read_field_docs
from sidecar.host.sections import list_settable, name_variable
from sidecar.host.text import format_count
from sidecar.host.values import dataclass
from sidecar.layouts import load_built_in
from sidecar.policy.review import ExportCheck
from sidecar.service.jobs.adoption import list_backups
from sidecar.service.readiness import StartChecks
from sidecar.service.settings import Start, Watch, Webhook
from sidecar.store.encryption.given_keys import GivenKeys, read_given_keys
from sidecar.wiring import (
    find_missing_key,
    find_store_folder,
    open_embedded,
    open_repository,
    open_sandbox,
    open_search,
)

RIGHT = "The configuration is right: `memory-sidecar serve` would start with it."
DUE_TIMES = 3
"""How many of the next times of a cron expression are listed."""


def run_config(args: argparse.Namespace) -> Result:
    """Run ``config``: check the configuration, or print the page of options."""
    if args.action == "options":
        page = render_options_page()
        return Result({"page": page}, [*page.split("\n")])
    try:
        config = load_config(args.config, store=args.store)
    except BadConfig as problem:
        return _build_result({}, [], [], [problem])
    if args.bind:
        config = replace(config, service=replace(config.service, bind=args.bind))
    found = asyncio.run(_try_to_start(config, args))
    changed, schedule = _list_changes(config), _list_schedule(config)
    document = {
        "store": config.store,
        "direct": config.direct,
        **{name: asdict(getattr(config, name)) for name in SECTIONS},
        "searched": found.searched,
        "webhooks": [asdict(hook) for hook in config.webhooks],
        "start": [asdict(table) for table in config.start],
        "watch": [asdict(table) for table in config.watch],
        "checks": [asdict(check) for check in config.checks],
        "layouts": sorted(config.layouts),
        "encrypts": found.keys.encrypts,
        "signs": found.keys.signs,
        "key_warnings": list(found.keys.warnings),
        "schedule": [asdict(row) for row in schedule],
        "unknown_variables": sorted(unknown := list_unknown_variables()),
        "changed": {name: value for name, value, _ in changed},
    }
    rows = [(name, _format_value(value), _format_value(default)) for name, value, default in changed]
    table = Table(("OPTION", "VALUE", "DEFAULT"), rows, "Every option has its default value.")
    warnings = [f"{name} is no option." + (f" Did you mean {near}?" if near else "") for name, near in unknown.items()]
    warnings += [*found.keys.warnings, *found.notes, *_list_missing_keys(config)]
    words: list[str | Table] = [table]
    if schedule:
        words.append(
            Table(("AT", "EXPRESSION", "NEXT"), [(row.option, row.expression, row.next[0]) for row in schedule])
        )
    return _build_result(document, words, warnings, found.problems)


def _list_missing_keys(config: Config) -> list[str]:
    """Return a warning for each provider that the service would use by itself and has no key for."""
    used = {f"[[watch]] {table.provider}": table.provider for table in config.watch}
    used |= {f"[[start]] {table.memory}": table.on.partition(":")[0] for table in config.start}
    missing = {where: variable for where, provider in used.items() if (variable := find_missing_key(provider))}
    return [
        f"{where}: {variable} is not set here. `memory-sidecar serve` needs it in its own environment; without it nothing is"
        " found or created there."
        for where, variable in missing.items()
    ]


@dataclass(frozen=True, slots=True)
class _ScheduleRow:
    """An option with a cron expression, and when it is due next, on the clocks of its time zone."""

    option: str
    expression: str
    timezone: str
    next: list[str]


def _list_schedule(config: Config) -> list[_ScheduleRow]:
    service = config.service
    options = {"retention.at": config.retention.at, "service.checkpoint_at": service.checkpoint_at}
    options["service.drill_at"] = service.drill_at
    rows = []
    for option, text in options.items():
        if cron := service.find_cron(text):
            due = islice(cron.list_next(datetime.now(UTC)), DUE_TIMES)
            shown = [moment.astimezone(cron.zone).isoformat() for moment in due]
            rows.append(_ScheduleRow(option, text, service.timezone, shown))
    return rows


def _build_result(
    document: dict[str, Any], words: list[str | Table], warnings: list[str], problems: list[SidecarError]
) -> Result:
    """Build the result: what was found, the warnings and problems, and finally whether the configuration is right."""
    told = [problem.as_dict() for problem in problems]
    document = {"ok": not problems, "problems": told, "warnings": warnings, **document}
    if problems:
        document["error"] = told[0]
    words = [*words, *(f"Warning: {warning}" for warning in warnings)]
    words += [f"Wrong: {problem.message} {problem.hint}".rstrip() for problem in problems]
    wrong = f"The configuration is not right: {format_count(len(problems), 'problem')}; `memory-sidecar serve` would not start."
    # The exit code of the first problem, as ``serve`` would have, which stops there.
    return Result(document, [*words, wrong if problems else RIGHT], problems[0].exit_code if problems else 0)


@dataclass(slots=True)
class _StartReport:
    """The result of trying to start."""

    keys: GivenKeys = field(default_factory=GivenKeys)
    searched: bool = False
    notes: list[str] = field(default_factory=list)
    problems: list[SidecarError] = field(default_factory=list)


async def _try_to_start(config: Config, args: argparse.Namespace) -> _StartReport:
    """Run every step of ``serve`` before it listens, and continue after problems."""
    found = _StartReport()

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except BadConfig as problem:
            found.problems.append(add_location(problem, find_config_file(args.config)))
        except BadReference as problem:
            found.problems.append(add_store_location(problem, args.config, args.store))
        except SidecarError as problem:
            found.problems.append(problem)

    with noted():
        found.searched = open_search(config.postgres) is not None
    with noted():
        found.keys = read_given_keys(config.encryption, config.signing)
    if config.audit.file:
        with noted():
            check_audit_file(Path(config.audit.file))
    if config.adopt.folder:
        folder = Path(config.adopt.folder).expanduser()
        list_backups(folder, lambda file, why, hint: found.notes.append(f"{file} is not adopted: {why} {hint}"))
    repository = None
    with noted():
        repository = open_repository(config.store, found.keys)
    with noted():
        if repository is not None and not found.searched:
            found.searched = open_embedded(repository, config.search) is not None
    readiness = StartChecks(
        Engine(
            repository=repository or open_repository(SOME_STORE, GivenKeys()),
            open_sandbox=open_sandbox,
            limits=config.limits,
            checks=config.checks,
        ),
        config.service,
        trying=True,
    )
    usable = repository is not None
    with _remove_new_folders(config.store):
        for step in readiness.steps:
            if not usable and step in (readiness.prepare_store, readiness.check_limits):
                continue  # reported already
            before = len(found.problems)
            with noted():
                await step()
            if step == readiness.prepare_store:
                usable = len(found.problems) == before
    if repository is not None:
        await repository.store.close()
    found.notes += readiness.notes
    return found


SOME_STORE = "file:/nowhere"
"""Never opened: stands in for a store with an invalid URL."""


@contextmanager
def _remove_new_folders(url: str) -> Iterator[None]:
    """Remove the store's folders that the body created. The user who checks may not be the one who serves, and the
    folders are private to their owner."""
    try:
        folder = find_store_folder(url)
    except BadReference:
        folder = None
    missing = [] if folder is None else [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        yield
    finally:
        with suppress(OSError):  # not empty any more
            for made in missing:
                made.rmdir()


def _list_changes(config: Config) -> list[tuple[str, Any, Any]]:
    """Return each option that differs from its default: its name, its value, the default."""
    plain = Config()
    rows: list[tuple[str, Any, Any]] = [
        ("store", config.store, build_default_store()),
        ("direct", config.direct, plain.direct),
    ]
    for name, kind in SECTIONS.items():
        default = asdict(kind())
        rows += [(f"{name}.{key}", value, default[key]) for key, value in asdict(getattr(config, name)).items()]
    rows.append(("webhooks", [hook.url.partition("?")[0] for hook in config.webhooks], []))
    rows.append(("start", [f"{table.memory} on {table.on}" for table in config.start], []))
    rows.append(("watch", [f"{table.provider}: {', '.join(table.memories)}" for table in config.watch], []))
    rows.append(("checks", [check.title for check in config.checks], []))
    known = load_built_in()
    rows.append(("layouts", [name for name in config.layouts if config.layouts[name] != known.get(name)], []))
    return [row for row in rows if row[1] != row[2]]


def render_options_page() -> str:
    """Render a page of every option, from the code that reads them."""
    lines = [
        "# Every option",
        "",
        "In a TOML file (`--config FILE` or `MEMORY_SIDECAR_CONFIG`), or in the environment variable beside it, which wins.",
        "`memory-sidecar config check` says whether all is right. This page is made by `memory-sidecar config options`.",
        "",
        "| option | variable | default | |",
        "|---|---|---|---|",
        "| `store` | `MEMORY_SIDECAR_STORE` | a folder under the user's data home | Where snapshots live |",
        "| `direct` | `MEMORY_SIDECAR_DIRECT` | `false` | Packs straight between sandbox and bucket |",
        "| | `MEMORY_SIDECAR_TOKEN` | | Bearer tokens the service accepts, separated by commas |",
        "| | `MEMORY_SIDECAR_URL`, `MEMORY_SIDECAR_CA` | | For the [client](conductor.md): where the service is, and a file "
        "with the certificates that vouch for it |",
        "| | `MEMORY_SIDECAR_POSTGRES` | | The URL of a Postgres database to search memories in: see [search](search.md) |",
    ]
    for section, kind in SECTIONS.items():
        lines += ["", f"## [{section}]", "", "| option | variable | default | |", "|---|---|---|---|"]
        lines += [
            f"| `{name}` | `{name_variable(section, name)}` | `{_format_value(default)}` | {about} |"
            for name, default, about in _list_options(kind)
            if name not in _list_tables(kind)
        ]
        lines += [
            f"| `{f'[{section}.{name}.…]' if isinstance(default, dict) else f'[[{section}.{name}]]'}` | | | {about} |"
            for name, default, about in _list_options(kind)
            if name in _list_tables(kind)
        ]
    lines += _render_table("webhooks", Webhook)
    sandboxes = "Memories that have a living sandbox: see [conductor](conductor.md#sandboxes-by-themselves)."
    lines += _render_table("start", Start, sandboxes)
    lines += _render_table("watch", Watch, "Sandboxes that name their memory: see [conductor](conductor.md#watch).")
    checks = "Commands that look at a snapshot before it becomes the head: see [review](review.md#checks)."
    lines += _render_table("checks", ExportCheck, checks)
    lines += [
        "",
        "## [layouts.NAME]",
        "",
        "Layouts of your own, and options of ours: see [layouts](layouts.md).",
        "",
    ]
    return "\n".join(lines)


def _render_table(name: str, kind: type[Any], about: str = "") -> list[str]:
    """Return the lines about one table of which there can be several."""
    head = ["", f"## [[{name}]]", "", *([about, ""] if about else []), "| option | default | |", "|---|---|---|"]
    return [
        *head,
        *(f"| `{key}` | `{_format_value(default)}` | {told} |" for key, default, told in _list_options(kind)),
    ]


def _list_options(kind: type[Any]) -> list[tuple[str, Any, str]]:
    """Return name, default and description of each field."""
    about = read_field_docs(kind)
    return [(entry.name, _find_default(entry), about.get(entry.name, "")) for entry in fields(kind)]


def _list_tables(kind: type[Any]) -> set[str]:
    return {entry.name for entry in fields(kind)} - {entry.name for entry in list_settable(kind)}


def _find_default(entry: Any) -> Any:
    if entry.default is not MISSING:
        return entry.default
    return entry.default_factory() if entry.default_factory is not MISSING else ""


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
