"""``config``: is the configuration right, and what can be set."""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
from dataclasses import MISSING, asdict, fields
from typing import Any

from sidecar.cli.policy import check_policy
from sidecar.cli.result import Result, Table
from sidecar.config import SECTIONS, Config, config_file, load_config, placed, store_placed, unknown_variables
from sidecar.engine import Engine
from sidecar.errors import BadConfig, BadReference, StoreError
from sidecar.sealing.given import Given, given
from sidecar.sections import settable, variable
from sidecar.service.settings import Webhook
from sidecar.service.tls import load_tls
from sidecar.wiring import open_repository, open_sink


def run_config(args: argparse.Namespace) -> Result:
    if args.action == "options":
        page = options_page()
        return Result({"page": page}, [*page.split("\n")])
    config = load_config(args.config, store=args.store)
    searched = open_sink(config.postgres) is not None
    unknown = unknown_variables()
    try:
        load_tls(config.service)
        keys = given(config.encryption, config.signing)
        unseen = asyncio.run(_compared_with_the_store(config, keys, args))
    except BadConfig as problem:
        raise placed(problem, config_file(args.config)) from None
    except BadReference as problem:
        raise store_placed(problem, args.config, args.store) from None
    document = {
        "ok": True,
        "store": config.store,
        "direct": config.direct,
        **{name: asdict(getattr(config, name)) for name in SECTIONS},
        "searched": searched,
        "webhooks": [asdict(hook) for hook in config.webhooks],
        "layouts": sorted(config.layouts),
        "encrypts": keys.encrypts,
        "signs": keys.signs,
        "key_warnings": list(keys.warnings),
        "unknown_variables": sorted(unknown),
        "store_problem": unseen,
    }
    rows = [("store", config.store), ("direct", str(config.direct).lower())]
    rows += [("searched", str(searched).lower())]
    rows += [(f"{name}.{key}", str(value)) for name in SECTIONS for key, value in asdict(getattr(config, name)).items()]
    words: list[str | Table] = ["The configuration is right.", Table(("OPTION", "VALUE"), rows)]
    words += [
        f"Warning: {name} is no option." + (f" Did you mean {near}?" if near else "") for name, near in unknown.items()
    ]
    words += [f"Warning: {told}" for told in (*keys.warnings, *filter(None, [unseen]))]
    return Result(document, words)


async def _compared_with_the_store(config: Config, keys: Given, args: argparse.Namespace) -> str:
    """Refuse what the store's memories have outgrown. Return why they could not be looked at, if so."""
    try:
        repository = open_repository(config.store, keys)
        try:
            await check_policy(Engine(repository=repository, limits=config.limits), args)
        finally:
            await repository.store.close()
    except StoreError as problem:
        return f"The store could not be looked at: {problem.message}"
    return ""


def options_page() -> str:
    """Every option, from the code that reads it."""
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
        "| | `MEMORY_SIDECAR_URL`, `MEMORY_SIDECAR_CA` | | For the [client](client.md): where the service is, and a file with "
        "the certificates that vouch for it |",
        "| | `MEMORY_SIDECAR_POSTGRES` | | The URL of a Postgres database to search memories in: see [search](search.md) |",
    ]
    for section, kind in SECTIONS.items():
        lines += ["", f"## [{section}]", "", "| option | variable | default | |", "|---|---|---|---|"]
        lines += [
            f"| `{name}` | `{variable(section, name)}` | `{_shown(default)}` | {about} |"
            for name, default, about in _options(kind)
            if name not in _tables(kind)
        ]
        lines += [
            f"| `[{section}.{name}.…]` | | | {about} |" for name, _, about in _options(kind) if name in _tables(kind)
        ]
    lines += ["", "## [[webhooks]]", "", "| option | default | |", "|---|---|---|"]
    lines += [f"| `{name}` | `{_shown(default)}` | {about} |" for name, default, about in _options(Webhook)]
    lines += [
        "",
        "## [layouts.NAME]",
        "",
        "Layouts of your own, and options of ours: see [layouts](layouts.md).",
        "",
    ]
    return "\n".join(lines)


def _options(kind: type[Any]) -> list[tuple[str, Any, str]]:
    """Name, default and description of each field; the description is the text below it in the source."""
    about: dict[str, str] = {}
    last = ""
    for node in [node for one in reversed(kind.__mro__[:-1]) for node in _body(one)[1:]]:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last:
            about[last] = " ".join(str(node.value.value).split())
    return [(entry.name, _default(entry), about.get(entry.name, "")) for entry in fields(kind)]


def _body(kind: type[Any]) -> list[ast.stmt]:
    """The statements of a class, its description first (an empty one, where it has none)."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    return body.body if ast.get_docstring(body) is not None else [ast.Pass(), *body.body]


def _tables(kind: type[Any]) -> set[str]:
    return {entry.name for entry in fields(kind)} - {entry.name for entry in settable(kind)}


def _default(entry: Any) -> Any:
    if entry.default is not MISSING:
        return entry.default
    return entry.default_factory() if entry.default_factory is not MISSING else ""


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
