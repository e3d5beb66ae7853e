"""The argument parser: commands, options and examples."""

from __future__ import annotations

import argparse
import re
from typing import Any

from sidecar import __version__
from sidecar.host.text import suggest
from sidecar.policy.limits import REASONS

EXIT_CODES = """exit codes:
  0 done   1 failed   2 wrong usage   4 restore incomplete   130 interrupted
  3 the head did not move (a guard, a limit, or diverged), nothing lost"""


EXAMPLES = {
    "export": [
        "export conductor --sandbox e2b:i3x9k2 --conversation c1",
        "export me --sandbox local:$HOME --project ~/app",
    ],
    "restore": [
        "restore conductor --sandbox daytona:box-7",
        "restore conductor --sandbox e2b:i3x9k2 --sandbox e2b:p4m7z1 --read-only",
        "restore conductor --sandbox local:/tmp/home --snapshot @2026-11-16T10:00Z",
    ],
    "attach": ["attach conductor --sandbox e2b:i3x9k2"],
    "detach": ["detach conductor"],
    "attachments": ["attachments"],
    "start": ["start conductor --on e2b:base --timeout 3600", "start conductor --on daytona:my-snapshot --key job-7"],
    "stop": ["stop conductor"],
    "wait": ["wait --sandbox e2b:i3x9k2 --timeout 30"],
    "move": ["move conductor --to daytona:my-snapshot", "move conductor --to e2b:base --keep-old"],
    "import": ["import conductor home.tar.gz"],
    "download": ["download conductor -o conductor.tar.gz"],
    "list": ["list --json"],
    "log": ["log conductor"],
    "show": ["show conductor", "show conductor 20261116T0830"],
    "diff": ["diff conductor", "diff conductor latest~5 latest --markdown", "diff conductor --sandbox e2b:i3x9k2"],
    "records": ["records conductor --kind observation", "records conductor conversation:c7"],
    "cat": ["cat conductor project/MEMORY.md"],
    "history": ["history conductor project/MEMORY.md", "history conductor 3f2a91bc"],
    "blame": ["blame conductor", "blame conductor project/MEMORY.md"],
    "brief": ["brief conductor", "brief conductor conversation:c7 --tokens 4000 --markdown"],
    "fork": ["fork conductor experiment"],
    "rollback": ["rollback conductor 20261116T083030845Z-318faecc"],
    "accept": ["accept conductor", 'accept conductor 20261116T0830 --because "read it with Kim"'],
    "decline": ['decline conductor --because "it contradicts the handbook"'],
    "verify": ["verify", "verify conductor --drill"],
    "forget": ["forget --dry-run", "forget conductor --keep-last 20 --daily 14"],
    "pin": ["pin conductor 20261116T083030845Z-318faecc"],
    "unpin": ["unpin conductor 20261116T083030845Z-318faecc"],
    "delete": ["delete experiment --yes"],
    "doctor": ["doctor", "doctor --sandbox e2b:i3x9k2 --project ~/app"],
    "layouts": ["layouts", "layouts claude-mem"],
    "serve": ["serve", "MEMORY_SIDECAR_TOKEN=$(openssl rand -hex 32) memory-sidecar serve --bind 0.0.0.0:8077"],
    "run": ["run -- python conductor.py"],
    "search": ['search "flaky deadlock"', "search deadlock --memory conductor --kind observation"],
    "index": ["index"],
    "rekey": ["rekey"],
    "audit": ["audit --memory conductor --since 7d", "audit --verify"],
    "keygen": ["keygen -o memories.key"],
    "token": [
        "token create acme --memories 'acme/*' --role append-only --expires 90d --max-bytes 10GB",
        "token create page --memories '*' --role read-only",
        "token list",
        "token revoke acme",
    ],
    "config": ["config check", "config check --bind 0.0.0.0:8077", "config options"],
    "demo": ["demo", "demo --home /tmp/sample"],
    "completion": [
        'eval "$(memory-sidecar completion bash)"',
        "completion fish > ~/.config/fish/completions/memory-sidecar.fish",
    ],
}
"""Examples by command, without the program's name, except where something comes before it."""
SHELLS = ("bash", "zsh", "fish")


def suggest_command(root: argparse.ArgumentParser, message: str) -> str:
    """Return the message; if it is about an unknown command, with the nearest command instead of the list of all."""
    found = re.match(r"argument COMMAND: invalid choice: '(.*?)' \(", message)
    if found is None:
        return message
    return f"There is no command {found[1]!r}. " + (suggest(found[1], list_commands(root)) or "--help lists them.")


def list_commands(root: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return each command's parser, by name."""
    (choices,) = [action.choices for action in root._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(choices)


def _build_epilog(name: str) -> str:
    lines = [f"memory-sidecar {line}" if line.startswith(name) else line for line in EXAMPLES[name]]
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


class _Absent:
    """A command that is left out of the parser: takes every option, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *words, **options: self


def build_parser(only: str = "") -> argparse.ArgumentParser:
    """Build the parser of the whole command line; with ``only``, of that command alone, which is done sooner."""
    root = argparse.ArgumentParser(
        prog="memory-sidecar",
        description="Makes an agent's memory outlive its sandbox.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"memory-sidecar {__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, summary: str) -> Any:
        if only and name != only:
            return _Absent()
        sub = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=_build_epilog(name) if name in EXAMPLES else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.add_argument(
            "--store", metavar="URL", help="file:/path, volume:/mount or s3://bucket/prefix (MEMORY_SIDECAR_STORE)"
        )
        sub.add_argument("--config", metavar="FILE", help="a TOML file (MEMORY_SIDECAR_CONFIG)")
        sub.add_argument("--json", action="store_true", help="print exactly one JSON document")
        return sub

    _add_verbs(command)
    _add_reading_commands(command)
    _add_changing_commands(command)
    return root


def _add_verbs(command: Any) -> None:
    export = command("export", "Export a sandbox's memory as a new snapshot.")
    export.add_argument("memory", metavar="MEMORY")
    export.add_argument("--sandbox", required=True, metavar="REF", help="e2b:ID, daytona:ID or local:/path/to/home")
    export.add_argument(
        "--layout", action="append", default=[], metavar="NAME", help="default: auto, whatever is there"
    )
    export.add_argument("--project", action="append", metavar="PATH", help="a project folder in the sandbox")
    export.add_argument("--conversation", default="", metavar="ID", help="kept with the snapshot")
    export.add_argument("--label", default="", metavar="TEXT", help="kept with the snapshot")
    export.add_argument("--wake", action="store_true", help="start the sandbox if it is paused or stopped")
    _add_user_option(export)
    _add_guard_options(export)

    restore = command("restore", "Restore a memory into a sandbox, or into several.")
    restore.add_argument("memory", metavar="MEMORY")
    restore.add_argument(
        "--sandbox",
        action="append",
        required=True,
        metavar="REF",
        help="e2b:ID, daytona:ID or local:/path/to/home; several times: fetched once, restored into each",
    )
    restore.add_argument("--snapshot", default="latest", metavar="ID|latest|@TIME")
    restore.add_argument("--mode", choices=("replace", "seed"), default="replace", help="seed never overwrites a file")
    restore.add_argument("--project", action="append", metavar="PATH", help="a project folder in the sandbox")
    restore.add_argument(
        "--withhold-projects",
        action="store_true",
        default=None,
        help="leave out projects whose folders are not there yet, for a later restore",
    )
    restore.add_argument("--must-exist", action="store_true", help="fail when there is no such memory (default: go on)")
    restore.add_argument("--wake", action="store_true", help="start the sandbox if it is paused or stopped")
    _add_user_option(restore)
    restore.add_argument("--force", action="store_true", help="restore even a database that SQLite finds damaged")
    restore.add_argument(
        "--read-only", action="store_true", help="what this sandbox exports later is stored beside the head"
    )
    restore.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="restore only a part, to be read: paths as `show` writes them (project/memory/**), layout:NAME or tier:NAME",
    )
    restore.add_argument(
        "--label", default="", metavar="TEXT", help="of a reader: the label of what it exports (default: its sandbox)"
    )
    restore.add_argument(
        "--discard", action="store_true", help="replace what no snapshot has without saving it or setting it aside"
    )
    restore.add_argument(
        "--brief", default="", metavar="PATH", help="put what to read first into this file of its home"
    )
    restore.add_argument("--tokens", type=int, metavar="N", help="with --brief: of that at most (default: 2000)")
    _add_attachment_commands(command)


def _add_user_option(verb: Any) -> None:
    verb.add_argument("--user", default="", metavar="NAME", help="work in the sandbox as this user (default: its own)")


def _add_attachment_commands(command: Any) -> None:
    attach = command("attach", "Have a running service look after a sandbox until it is detached.")
    attach.add_argument("memory", metavar="MEMORY")
    attach.add_argument("--sandbox", required=True, metavar="REF", help="e2b:ID, daytona:ID or local:/path/to/home")
    attach.add_argument("--restore", action="store_true", help="restore the memory into it first")
    attach.add_argument("--checkpoint-every", type=float, metavar="SECONDS", help="between exports (default: 300)")
    attach.add_argument("--layout", action="append", default=[], metavar="NAME", help="default: whatever is there")
    attach.add_argument("--project", action="append", metavar="PATH", help="a project folder in the sandbox")
    attach.add_argument("--conversation", default="", metavar="ID", help="kept with its snapshots")
    attach.add_argument("--wake", action="store_true", help="start the sandbox if it is paused or stopped")
    _add_user_option(attach)
    detach = command("detach", "Have a service stop looking after a sandbox.")
    detach.add_argument("memory", metavar="MEMORY")
    detach.add_argument("--sandbox", default="", metavar="REF", help="which one, where there are several")
    detach.add_argument("--export", action="store_true", help="export it a last time first")
    command("attachments", "List the sandboxes that services look after.")
    start = command("start", "Have a running service create a sandbox, restore a memory into it and look after it.")
    start.add_argument("memory", metavar="MEMORY")
    start.add_argument("--on", required=True, metavar="PLACE", help="e2b:TEMPLATE, daytona:SNAPSHOT or local:")
    start.add_argument("--metadata", action="append", default=[], metavar="K=V", help="kept with it by its provider")
    start.add_argument("--timeout", type=float, metavar="SECONDS", help="until its provider ends it")
    start.add_argument("--key", metavar="KEY", help="under one key it is done once, however often it is called")
    start.add_argument("--must-exist", action="store_true", help="a memory that is not there is an error")
    start.add_argument("--checkpoint-every", type=float, metavar="SECONDS", help="between exports (default: 300)")
    start.add_argument("--layout", action="append", default=[], metavar="NAME", help="default: whatever is there")
    start.add_argument("--project", action="append", metavar="PATH", help="a project folder in the sandbox")
    start.add_argument("--conversation", default="", metavar="ID", help="kept with its snapshots")
    _add_user_option(start)
    move = command(
        "move", "Have a service move a memory to a new sandbox, and end the old one once the new one has it."
    )
    move.add_argument("memory", metavar="MEMORY")
    move.add_argument("--to", required=True, metavar="PLACE", help="e2b:TEMPLATE, daytona:SNAPSHOT or local:")
    move.add_argument("--sandbox", default="", metavar="REF", help="which one is left, where there are several")
    move.add_argument("--keep-old", action="store_true", help="do not end the old one, only stop looking after it")
    move.add_argument("--metadata", action="append", default=[], metavar="K=V", help="kept with it by its provider")
    move.add_argument("--timeout", type=float, metavar="SECONDS", help="until its provider ends it")
    move.add_argument("--key", metavar="KEY", help="under one key it is done once, however often it is called")
    _add_user_option(move)
    stop = command("stop", "Have a service export a sandbox, and end it once it is saved.")
    stop.add_argument("memory", metavar="MEMORY")
    stop.add_argument("--sandbox", default="", metavar="REF", help="which one, where there are several")
    stop.add_argument("--discard", action="store_true", help="end it also if its memory cannot be saved")
    wait = command("wait", "Wait until the memory of a sandbox is in place: exit code 0, or 1 if it is not in time.")
    wait.add_argument("--sandbox", required=True, metavar="REF", help="e2b:ID, daytona:ID or local:/path/to/home")
    wait.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="default: 60")


def _add_guard_options(verb: Any) -> None:
    verb.add_argument(
        "--force", action="store_true", help="move the head whatever the guards say (a limit is no guard)"
    )
    reasons = f"{', '.join(REASONS[:-1])} or {REASONS[-1]}"
    verb.add_argument("--allow", action="append", default=[], metavar="REASON", help=f"one guard only: {reasons}")


def _add_reading_commands(command: Any) -> None:
    command("list", "List the memories of a store.")
    log = command("log", "List a memory's snapshots.")
    log.add_argument("memory", metavar="MEMORY")
    show = command("show", "Show a snapshot and the files in it.")
    show.add_argument("memory", metavar="MEMORY")
    show.add_argument("snapshot", nargs="?", default="latest", metavar="SNAPSHOT")
    _add_record_commands(command)
    download = command("download", "Write a snapshot as an ordinary tarball.")
    download.add_argument("memory", metavar="MEMORY")
    download.add_argument("snapshot", nargs="?", default="latest", metavar="SNAPSHOT")
    download.add_argument("-o", "--output", required=True, metavar="FILE", help=".tar.gz, .tar.zst or .tar")
    verify = command("verify", "Check that every snapshot is still whole.")
    verify.add_argument("memory", nargs="?", metavar="MEMORY")
    verify.add_argument("--drill", action="store_true", help="restore random snapshots into a scratch sandbox instead")
    verify.add_argument("--count", type=int, default=3, metavar="N", help="how many to restore (default: 3)")
    search = command("search", "Find what memories say.")
    search.add_argument("words", nargs="+", metavar="WORDS", help='as for a search engine: "exact words" or -without')
    search.add_argument(
        "--memory", action="append", default=[], dest="in_memory", metavar="MEMORY", help="only in this one"
    )
    search.add_argument(
        "--kind", action="append", default=[], metavar="KIND", help="only these: observation, section, learning…"
    )
    search.add_argument(
        "--project", action="append", default=[], dest="in_project", metavar="NAME", help="only of this project"
    )
    search.add_argument("--since", metavar="TIME", help="only what was written since: 24h, 7d, 2026-11-16T10:00Z")
    search.add_argument("--until", metavar="TIME", help="only what was written before")
    search.add_argument("--all", action="store_true", help="also what is not known any more: since when, until when")
    search.add_argument("--limit", type=int, default=20, metavar="N", help="how many to show (default: 20)")
    index = command("index", "Bring what can be searched up to date with the store.")
    index.add_argument("memory", nargs="?", metavar="MEMORY", help="default: all, and whatever is in the store no more")
    index.add_argument("--all", action="store_true", help="the past too, so that `search --all` finds it")
    audit = command("audit", "Show who did what to which memory, if [audit] is set.")
    audit.add_argument("--memory", metavar="MEMORY", help="only calls on this one")
    audit.add_argument("--since", metavar="TIME", help="24h, 7d, 2026-11-16T10:00Z (default: all)")
    audit.add_argument("--verify", action="store_true", help="check that nothing was removed or altered (exit 1 if so)")
    audit.add_argument("--file", metavar="FILE", help="read what [audit] file has, not the store")
    config = command("config", "Check the configuration, or print a page with every option.")
    config.add_argument("action", choices=("check", "options"))
    config.add_argument("--bind", metavar="HOST:PORT", help="check: as serve will be told")
    serve = command("serve", "Serve the HTTP API until told to stop.")
    serve.add_argument("--bind", metavar="HOST:PORT", help="default: 127.0.0.1:8077")
    _add_token_command(command)
    run = command("run", "Serve beside a command: it finds the service in MEMORY_SIDECAR_URL and MEMORY_SIDECAR_TOKEN.")
    run.add_argument("--bind", metavar="HOST:PORT", default="127.0.0.1:0", help="default: loopback, any free port")
    run.add_argument("child", nargs=argparse.REMAINDER, metavar="-- COMMAND…")
    completion = command("completion", "Print what makes a shell complete commands and options.")
    completion.add_argument("shell", choices=SHELLS)
    demo = command("demo", "Watch a memory outlive its sandbox, in a temporary folder; takes seconds.")
    demo.add_argument("--home", metavar="FOLDER", help="only make a sample home there, to try other commands with")
    keygen = command("keygen", "Print a new key to encrypt with.")
    keygen.add_argument("--signing", action="store_true", help="a key to sign with instead")
    keygen.add_argument("-o", "--output", metavar="FILE", help="a new file for it, that only its owner can read")
    layouts = command("layouts", "List the layouts; of those named, everything.")
    layouts.add_argument("names", nargs="*", metavar="NAME")
    doctor = command(
        "doctor", "Check the store and, if named, a sandbox: what an export of it would bring, and what not."
    )
    doctor.add_argument("--sandbox", metavar="REF")
    _add_user_option(doctor)
    doctor.add_argument("--layout", action="append", default=[], metavar="NAME", help="default: whatever is there")
    doctor.add_argument("--project", action="append", metavar="PATH", help="a project folder in the sandbox")


def _add_record_commands(command: Any) -> None:
    diff = command("diff", "Show what changed between two snapshots, record by record; by default, with the head.")
    diff.add_argument("memory", metavar="MEMORY")
    diff.add_argument("old", nargs="?", default="", metavar="A", help="default: the parent of B")
    diff.add_argument("new", nargs="?", default="", metavar="B", help="default: latest; A, if that never was the head")
    diff.add_argument("--files", action="store_true", help="only files and their sizes")
    diff.add_argument("--with", dest="other", default="", metavar="MEMORY", help="B is a snapshot of this memory")
    diff.add_argument("--sandbox", default="", metavar="REF", help="what this sandbox has that A, or the head, has not")
    diff.add_argument("--project", action="append", metavar="PATH", help="a project folder in the sandbox")
    diff.add_argument("--kind", action="append", default=[], metavar="KIND", help="only these; message is counted only")
    diff.add_argument("--markdown", action="store_true", help="for a pull request or a chat")
    records = command("records", "List what a snapshot says.")
    records.add_argument("memory", metavar="MEMORY")
    records.add_argument("snapshot", nargs="?", default="latest", metavar="SNAPSHOT")
    records.add_argument("--kind", action="append", default=[], metavar="KIND", help="observation, section, learning…")
    records.add_argument("--limit", type=int, default=0, metavar="N", help="at most so many (default: 100000)")
    cat = command("cat", "Print a file of a snapshot.")
    cat.add_argument("memory", metavar="MEMORY")
    cat.add_argument("path", metavar="PATH", help="as show writes it: project/MEMORY.md")
    cat.add_argument("--snapshot", default="latest", metavar="SNAPSHOT")
    history = command("history", "List every version of a file or a record, with its conversation.")
    history.add_argument("memory", metavar="MEMORY")
    history.add_argument("what", metavar="PATH|RECORD")
    history.add_argument("--snapshot", default="latest", metavar="SNAPSHOT")
    blame = command("blame", "Show which conversation and sandbox taught each record of a snapshot.")
    blame.add_argument("memory", metavar="MEMORY")
    blame.add_argument("path", nargs="?", default="", metavar="PATH")
    blame.add_argument("--snapshot", default="latest", metavar="SNAPSHOT")
    blame.add_argument("--kind", action="append", default=[], metavar="KIND", help="only these")
    brief = command("brief", "Show what an agent should read first of a snapshot, within a budget of tokens.")
    brief.add_argument("memory", metavar="MEMORY")
    brief.add_argument("snapshot", nargs="?", default="latest", metavar="SNAPSHOT")
    brief.add_argument(
        "--tokens", type=int, default=2000, metavar="N", help="of the whole text at most (default: 2000)"
    )
    brief.add_argument("--markdown", action="store_true", help="as Markdown")


def _add_token_command(command: Any) -> None:
    token = command("token", "Make, list or revoke a named token of the service, for some memories and verbs.")
    token.add_argument("action", choices=("create", "list", "revoke"))
    token.add_argument("name", nargs="?", metavar="NAME")
    may = token.add_argument_group("create: what its holder may do")
    may.add_argument(
        "--memories",
        action="append",
        default=[],
        metavar="PATTERN",
        help="'acme/*' (all below acme/), '*' (all), an id",
    )
    may.add_argument("--role", choices=("append-only", "read-only", "export-restore"), help="instead of --verbs")
    may.add_argument(
        "--verbs", action="append", default=[], metavar="VERB,…", help="read, export, restore, change, delete, admin"
    )
    may.add_argument(
        "--sandboxes", action="append", default=[], metavar="PATTERN", help="'daytona:acme-*' (default: any)"
    )
    may.add_argument("--expires", metavar="END", help="30d, 12h, or 2027-01-31 (default: never)")
    may.add_argument("--max-bytes", metavar="SIZE", help="what its memories may take in the store: 10GB")
    may.add_argument("--max-memories", type=int, metavar="N")
    may.add_argument("--calls-per-minute", type=int, metavar="N")
    may.add_argument("--concurrent", type=int, metavar="N", help="exports and restores at once; others wait")


def _add_changing_commands(command: Any) -> None:
    adopt = command("import", "Adopt an ordinary tarball of a home as a new snapshot.")
    adopt.add_argument("memory", metavar="MEMORY")
    adopt.add_argument("file", metavar="FILE")
    adopt.add_argument("--layout", action="append", default=[], metavar="NAME")
    adopt.add_argument("--label", default="", metavar="TEXT", help="kept with the snapshot")
    _add_guard_options(adopt)
    fork = command("fork", "Begin a new memory with a copy of another's head.")
    fork.add_argument("memory", metavar="MEMORY")
    fork.add_argument("new", metavar="NEW")
    fork.add_argument("--snapshot", default="latest", metavar="ID|latest|@TIME")
    rollback = command("rollback", "Make another snapshot the head.")
    rollback.add_argument("memory", metavar="MEMORY")
    rollback.add_argument("snapshot", metavar="SNAPSHOT")
    for name, summary, default in (
        (
            "accept",
            "Make a snapshot the head that waits for a review, was rejected or has diverged.",
            "the newest that waits, with those before it; else the newest rejected since the head was made",
        ),
        ("decline", "Keep a snapshot from ever becoming the head.", "the newest that waits for a review"),
    ):
        decision = command(name, summary)
        decision.add_argument("memory", metavar="MEMORY")
        decision.add_argument("snapshot", nargs="?", default="", metavar="SNAPSHOT", help=f"default: {default}")
        decision.add_argument("--because", default="", metavar="WORDS", help="why; kept, and shown by log and show")
    _add_retention_commands(command)
    rekey = command("rekey", "Seal and sign everything anew, for the keys that are set now.")
    rekey.add_argument("memory", nargs="?", metavar="MEMORY", help="default: all, and what is beside them")
    rekey.add_argument("--trust-unsigned", action="store_true", help="sign what has no signature yet, too")
    delete = command("delete", "Remove every byte of a memory.")
    delete.add_argument("memory", metavar="MEMORY")
    delete.add_argument("--yes", action="store_true", help="really")


def _add_retention_commands(command: Any) -> None:
    for name, summary in (
        ("pin", "Keep a snapshot whatever the rules say."),
        ("unpin", "Leave a snapshot to the rules again."),
    ):
        pin = command(name, summary)
        pin.add_argument("memory", metavar="MEMORY")
        pin.add_argument("snapshot", metavar="SNAPSHOT")
    forget = command("forget", "Let go the snapshots that no rule keeps, and collect what nothing needs any more.")
    forget.add_argument("memory", nargs="?", metavar="MEMORY", help="default: all, and the limit of the store")
    forget.add_argument("--dry-run", action="store_true", help="only show each snapshot, and why it stays or goes")
    forget.add_argument("--grace", metavar="DURATION", help="how long packs that nothing needs wait (default: 24h)")
    rules = forget.add_argument_group("rules, instead of those in the config's [retention]")
    rules.add_argument("--keep-last", type=int, metavar="N")
    rules.add_argument("--keep-within", metavar="DURATION", help="12h, 30d, 1y")
    for name in ("hourly", "daily", "weekly", "monthly", "yearly"):
        rules.add_argument(f"--{name}", type=int, metavar="N")
    rules.add_argument("--keep-labelled", action="append", metavar="PATTERN")
    rules.add_argument("--memory-bytes", type=int, metavar="N")
