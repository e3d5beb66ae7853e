"""The entry point: parse the arguments, run the command, print its result, return the exit code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import importlib
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from sidecar.cli.arguments import build_parser, suggest_command
from sidecar.cli.result import Result
from sidecar.cli.screen import ProgressBar, is_terminal, print_error, route_logs, show_result
from sidecar.errors import BadConfig, BadReference, Interrupted, SidecarError

if TYPE_CHECKING:
    from sidecar.audit.settings import Audit
    from sidecar.engine import Engine
    from sidecar.ports import Store

CHANGING = ("export", "import", "fork", "rollback", "accept", "delete")
LATER = "The memory itself is safe; `memory-sidecar index`, its next export or a service catches up."

# Imported only when called, so that every command starts fast.
COMMANDS = {
    "export": "verbs.run_export",
    "restore": "verbs.run_restore",
    "attach": "attachments.run_attach",
    "detach": "attachments.run_detach",
    "attachments": "attachments.run_attachments",
    "start": "attachments.run_start",
    "move": "attachments.run_move",
    "stop": "attachments.run_stop",
    "wait": "attachments.run_wait",
    "import": "verbs.run_import",
    "download": "verbs.run_download",
    "list": "stores.run_list",
    "log": "stores.run_log",
    "show": "stores.run_show",
    "diff": "records.run_diff",
    "records": "records.run_records",
    "cat": "records.run_cat",
    "history": "records.run_history",
    "blame": "records.run_blame",
    "brief": "records.run_brief",
    "fork": "stores.run_fork",
    "rollback": "stores.run_rollback",
    "accept": "stores.run_accept",
    "decline": "stores.run_decline",
    "verify": "doctor.run_verify",
    "forget": "retention.run_forget",
    "pin": "retention.run_pin",
    "unpin": "retention.run_unpin",
    "delete": "stores.run_delete",
    "doctor": "doctor.run_doctor",
    "layouts": "layouts.run_layouts",
    "serve": "service.run_serve",
    "run": "run.run_run",
    "search": "search.run_search",
    "index": "search.run_index",
    "rekey": "keys.run_rekey",
    "audit": "audit.run_audit",
}
KNOWN = frozenset({*COMMANDS, "config", "keygen", "token", "completion", "demo"})
WITH_INDEX = frozenset(
    {"search", "index", "doctor", "serve", "run", "export", "import", "fork", "rollback", "accept", "delete"}
)
"""The commands that read or change the search index."""
WITH_EMBEDDED_INDEX = frozenset({"search", "index", "doctor", "serve", "run", "delete"})
"""Those that do so where it is on this machine: a search brings it up to date by itself, so the others need not."""
LASTING = ("serve", "run")
SELDOM = 50_000
"""The threshold of the garbage collector, in new objects. A command makes next to no garbage, and a collection scans
everything that was loaded."""


def run_alone() -> NoReturn:
    """Run one command in a process of its own, which ends with it at once: to clear up all that was loaded takes longer
    than some commands."""
    code = main()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raises, and shows no traceback for an error that a user can
    cause."""
    words = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    route_logs()
    wants_json = "--json" in list(itertools.takewhile(lambda word: word != "--", words))
    try:
        args = _parse(words, wants_json)
        if argv is None and args.command not in LASTING:  # a process of its own, which soon ends
            gc.set_threshold(SELDOM)
            gc.freeze()
        if args.command == "config":
            from sidecar.cli.config import run_config

            return _print(run_config(args), wants_json)
        if args.command == "keygen":
            from sidecar.cli.keys import run_keygen

            return _print(run_keygen(args), wants_json)
        if args.command == "token":
            from sidecar.cli.tokens import run_token

            return _print(run_token(args), wants_json)
        if args.command == "completion":
            from sidecar.cli.completion import run_completion

            return _print(run_completion(args), wants_json)
        if args.command == "demo":
            from sidecar.cli.demo import run_demo

            return _print(run_demo(args), wants_json)
        result = asyncio.run(_run(args))
    except SidecarError as problem:
        return _fail(problem, wants_json)
    except KeyboardInterrupt:
        return _fail(Interrupted("Interrupted before it was done."), wants_json)
    return _print(result, wants_json)


def _parse(words: Sequence[str], wants_json: bool) -> argparse.Namespace:
    commands = build_parser(words[0] if words and words[0] in KNOWN else "")

    def refuse(sub: argparse.ArgumentParser, message: str) -> NoReturn:
        message = suggest_command(commands, message)
        if wants_json:
            details = {"code": "usage", "message": message, "hint": "See --help.", "retryable": False}
            print(json.dumps({"error": details}))
        else:
            sub.print_usage(sys.stderr)
            print_error(f"error: {message}")
        raise SystemExit(2)

    for sub in [commands, *commands._subparsers._group_actions[0].choices.values()]:  # type: ignore[union-attr]
        sub.error = functools.partial(refuse, sub)
    return commands.parse_args(words)


async def _run(args: argparse.Namespace) -> Result:
    """Read the config, open the store and run a command that needs them."""
    from sidecar.config.own_files import build_local_policy
    from sidecar.config.settings import add_location, add_store_location, find_config_file, load_config
    from sidecar.engine.core import Engine
    from sidecar.search.settings import read_postgres_url
    from sidecar.store.encryption.given_keys import read_given_keys
    from sidecar.wiring import find_store_folder, open_index, open_provider, open_repository, open_sandbox

    if "memory" in args and args.memory is not None:
        from sidecar.ids import check_memory_id

        check_memory_id(args.memory)
    config = load_config(args.config, store=args.store)
    module, _, name = COMMANDS[args.command].partition(".")
    command = getattr(importlib.import_module(f"sidecar.cli.{module}"), name)
    try:
        keys = read_given_keys(config.encryption, config.signing)
        trusting = getattr(args, "trust_unsigned", False)
        repository = open_repository(config.store, keys, trust_unsigned=trusting)
    except BadConfig as problem:
        raise add_location(problem, find_config_file(args.config)) from None
    except BadReference as problem:
        raise add_store_location(problem, args.config, args.store) from None
    if args.command == "audit" and not config.audit.store:
        args.file = args.file or config.audit.file
    indexed = args.command in (WITH_INDEX if read_postgres_url(config.postgres) else WITH_EMBEDDED_INDEX)
    _warn(keys.warnings, config.service.log if args.command in LASTING else "", beside=args.command == "run")
    engine = Engine(
        repository=repository,
        open_sandbox=open_sandbox,
        open_provider=open_provider,
        layouts=config.layouts,
        limits=config.limits,
        guards=config.guards,
        privacy=config.privacy,
        timing=config.timing,
        retention=config.retention,
        restoring=config.restore,
        review=config.review,
        checks=config.checks,
        direct=config.direct,
        local=build_local_policy(config, find_config_file(args.config), find_store_folder(config.store)),
        index=open_index(repository, config.search, config.postgres, config.layouts) if indexed else None,
    )
    # SIGTERM cancels the command, so that its scratch files are removed before it ends.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)  # type: ignore[union-attr]
    try:
        # A service prints lines to be copied, which a progress bar on the same screen would break.
        with_bar = is_terminal() and not args.json and args.command not in LASTING
        with ProgressBar() if with_bar else contextlib.nullcontext() as bar:
            run = functools.partial(command, replace(engine, progress=bar) if bar else engine, args)
            result = await _run_recorded(config.audit, repository.store, args, run)
            return await _update_index(engine, args, result, config.postgres.wait)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        await repository.store.close()


async def _run_recorded(
    audit: Audit, store: Store, args: argparse.Namespace, run: Callable[[], Awaitable[Result]]
) -> Result:
    """Run a command, and record it if an audit is kept that tells of such."""
    if audit.kept:
        from sidecar.cli.audit import CHANGING, READING, record_command

        if args.command in CHANGING | READING:
            return await record_command(audit, store, args, run)
    return await run()


def _warn(warnings: Sequence[str], log: str, *, beside: bool) -> None:
    """Print warnings on stderr, or log them for a service."""
    if log and warnings:
        from sidecar.service.logs import configure_logs

        configure_logs(log, beside=beside)
    for told in warnings:
        if log:
            logging.getLogger("sidecar").warning(told)
        else:
            print_error(f"warning: {told}")


def _print(result: Result, wants_json: bool) -> int:
    try:
        if wants_json:
            print(json.dumps(result.document))
        else:
            show_result(result)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return result.exit_code


def _fail(problem: SidecarError, wants_json: bool) -> int:
    details: dict[str, Any] = problem.as_dict()
    if wants_json:
        print(json.dumps({"error": details}))
    print_error(f"{problem.message} {problem.hint}".rstrip())
    return problem.exit_code


async def _update_index(engine: Engine, args: argparse.Namespace, result: Result, seconds: float) -> Result:
    """Update a changed memory in the search database, if there is one. Return the result, with a warning if that did
    not succeed in time."""
    if engine.index is None or args.command not in CHANGING:
        return result
    memory = args.new if args.command == "fork" else args.memory
    try:
        async with asyncio.timeout(seconds):
            if engine.index.embedded and not await engine.index.is_begun():
                return result
            await engine.index.update_memory(memory)
    except TimeoutError:
        return _add_warning(
            result, f"Search does not know of this yet: writing it took longer than {seconds:g} s. {LATER}"
        )
    except SidecarError as problem:
        return _add_warning(result, f"Search does not know of this yet: {problem.message} {LATER}")
    except Exception as problem:  # a bug here must not cost the command its receipt
        return _add_warning(result, f"Search does not know of this yet: {type(problem).__name__}: {problem}. {LATER}")
    except asyncio.CancelledError:  # SIGTERM: the receipt is printed even so
        return _add_warning(result, f"Search does not know of this yet: it was interrupted. {LATER}")
    return result


def _add_warning(result: Result, warning: str) -> Result:
    document = {**result.document, "warnings": [*result.document.get("warnings", []), warning]}
    return replace(result, document=document, words=[*result.words, f"Warning: {warning}"])
