"""Writes what comes from the code: docs/reference/, docs/options.md and docs/openapi.json. Run it with ``make reference``.

A test compares the pages with what this would write. Codes that no class stands for (those of the program inside the
sandbox, of limits, of guards and of HTTP itself) are described in tables, here or beside the code; a code without a line
there, or a line without a code, is refused.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

import adapters
import sidecar
from sidecar.cli.config import render_options_page
from sidecar.engine.sandbox.dialogue import ProgramError, build_error
from sidecar.engine.sandbox.refusals import REFUSALS
from sidecar.errors import LimitExceeded, ProgramFailed, SidecarError
from sidecar.models.answers import Problem
from sidecar.policy.limits import CODES, REASONS
from sidecar.service.api.app import make_api
from sidecar.service.api.codes import OVER_HTTP
from sidecar.service.api.examples import EVENT
from sidecar.service.api.problems import HTTP_CODES, OTHER_HTTP, status_of
from sidecar.service.event_details import DETAILS
from sidecar.service.event_types import EVENTS
from sidecar.service.jobs.index import IndexMetrics
from sidecar.service.jobs.webhooks import body_of, headers_of
from sidecar.service.metrics import Metrics

DOCS = Path(__file__).parent
CODE = (DOCS.parent / "sidecar", DOCS.parent / "adapters")
MADE = "<!-- Made by `make reference` from the code. Do not edit. -->"

LIMITS = {
    "limit-bytes": "All files together, unpacked.",
    "limit-depth": "The parts of a path below its root.",
    "limit-file-bytes": "One file.",
    "limit-files": "The number of files, folders and links.",
    "limit-memory-bytes": "All that the memory has in the store.",
    "limit-packed": "One pack as it travels.",
    "limit-store-bytes": "All memories in the store.",
}

GUARDS = {
    "empty": "The sandbox has no memory at all, and the head has one.",
    "required-missing": "A file that the layout requires is gone, and the head has it.",
    "root-missing": "Nothing is left of a root that the head has.",
    "shrunk": "The export has far fewer bytes or files than the head.",
    "schema-downgrade": "A database has an older schema than in the head.",
    "database-damaged": "SQLite reports damage in a database.",
    "credentials": "There are credentials in it, and the config refuses them. Nothing is kept.",
    "unknown-lineage": "The memory in the sandbox belongs to another store.",
    "other-memory": "The folders in the sandbox hold another memory.",
}


@cache
def pages() -> dict[Path, str]:
    """Every page that is made, by where it is."""
    return {
        DOCS / "openapi.json": json.dumps(openapi(), indent=2) + "\n",
        DOCS / "options.md": render_options_page(),
        DOCS / "reference/errors.md": errors_page(),
        DOCS / "reference/events.md": events_page(),
        DOCS / "reference/metrics.md": metrics_page(),
        DOCS / "reference/webhooks.md": webhooks_page(),
    }


@cache
def openapi() -> dict[str, Any]:
    """The OpenAPI document."""
    return make_api().openapi()


@cache
def error_classes() -> list[type[SidecarError]]:
    """The whole tree, parents first. Every module is imported, so that no subclass is missed."""
    for package in (sidecar, adapters):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
    return [SidecarError, *_below(SidecarError)]


def _below(kind: type[SidecarError]) -> Iterator[type[SidecarError]]:
    # By module, as the order of imports differs.
    for one in sorted(kind.__subclasses__(), key=lambda one: one.__module__):
        if one.__module__.partition(".")[0] in ("sidecar", "adapters"):
            yield one
            yield from _below(one)


def has_own_code(kind: type[SidecarError]) -> bool:
    """Whether it has a code that callers see. One without is told as its parent; ``SidecarProblem`` carries the service's."""
    return "code" in vars(kind)


def told(kind: type[SidecarError]) -> str:
    """What happened: the first paragraph of its docstring."""
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split()).replace("``", "`")


def errors_page() -> str:
    kinds = [kind for kind in error_classes() if has_own_code(kind)]
    of = {place: [kind for kind in kinds if _place(kind) == place] for place in ("", "service", "cli", "client")}
    head = ("code", "what happened", "what to do", "retry")
    statuses = _problems()
    return _page(
        "Error codes",
        "Every error has a stable `code`, a message, a `hint` and `retryable`: whether the same call",
        "can succeed later. The command line prints message and hint, and with `--json` all four. Over HTTP an",
        "error is `application/problem+json` with `code`, `detail`, `hint`, `retryable` and `status`. In Python",
        "it is an exception below `SidecarError`.",
        "",
        "## Errors of exports, restores and stores",
        "",
        *_table((*head, "HTTP", "exit"), ([*_row(kind), status_of(kind), kind.exit_code] for kind in of[""])),
        "",
        "## Limits",
        "",
        f"In the place of `{LimitExceeded.code}`, the limit by name. HTTP {status_of(LimitExceeded)}, exit",
        f"{LimitExceeded.exit_code}; a receipt has it as the `reason` of a `rejected` export.",
        "",
        *_table(("code", "what is limited"), ((f"`{code}`", about) for code, about in _complete(LIMITS, _limits()))),
        "",
        "## Guards",
        "",
        "The `reason` in the receipt of an export that is `rejected`; exit 3. `--allow CODE` allows one of them.",
        "",
        *_table(("code", "what the guard found"), ((f"`{code}`", about) for code, about in _complete(GUARDS, REASONS))),
        "",
        "Two more reasons come with the outcome `diverged`: `diverged` (the sandbox did not start from the head)",
        "and `read-only` (it was restored with `--read-only`).",
        "",
        "## The program inside the sandbox",
        "",
        f"In the place of `{ProgramFailed.code}`, what the program said. HTTP {status_of(ProgramFailed)}, exit",
        f"{ProgramFailed.exit_code}; a restore that fails this way has the code as the `reason` of `incomplete`.",
        "The program says itself whether a retry can help.",
        "",
        *_table(
            ("code", "what happened", "what to do"),
            (
                (f"`{code}`", about, build_error(ProgramError(code=code, message="")).hint)
                for code, about in _complete(REFUSALS, _refusals())
            ),
        ),
        "",
        "## The service",
        "",
        *_table((*head, "HTTP"), ([*_row(kind), status_of(kind)] for kind in of["service"])),
        "",
        "And for what is wrong with a request itself:",
        "",
        *_table(
            ("code", "what happened", "HTTP"),
            ((f"`{code}`", about, statuses[code]) for code, about in _complete(OVER_HTTP, statuses)),
        ),
        "",
        "## The command line",
        "",
        *_table((*head, "exit"), ([*_row(kind), kind.exit_code] for kind in of["cli"])),
        "",
        "## The Python client",
        "",
        "`SidecarProblem` carries the code that the service sent. The client's own:",
        "",
        *_table(head, (_row(kind) for kind in of["client"])),
    )


def _place(kind: type[SidecarError]) -> str:
    """Who tells it: the service, the command line or the client alone; "" for all."""
    room = kind.__module__.split(".")[1]
    return room if room in ("service", "cli", "client") else ""


def _row(kind: type[SidecarError]) -> list[str]:
    return [f"`{kind.code}`", told(kind), kind.default_hint, "yes" if kind.retryable else "no"]


def _complete(described: dict[str, str], used: Iterable[str]) -> list[tuple[str, str]]:
    """The descriptions, by code. Raise ``ValueError`` unless they are of exactly the codes that are used."""
    if wrong := set(described) ^ set(used):
        raise ValueError(f"described here or used in the code, but not both: {', '.join(sorted(wrong))}")
    return sorted(described.items())


def _limits() -> set[str]:
    return set(CODES.values())


def _refusals() -> set[str]:
    """The codes that the program in the sandbox, in Python or as a shell script, and the engine on its behalf may tell."""
    found = _codes("Refusal") | _codes(ProgramFailed.__name__, keyword="code")
    for script in (script for folder in CODE for script in folder.rglob("*.sh")):
        found |= set(re.findall(r"\bfail ([a-z]+(?:-[a-z]+)*) \"", script.read_text()))
    return {code for code in found if not code.startswith("limit-")}


def _problems() -> dict[str, str]:
    """The codes of problems that no class of the tree stands for, and the statuses that come with each."""
    found = {(code, str(status)) for status, code in HTTP_CODES.items()} | {(OTHER_HTTP, "any other")}
    for _, call in _calls(Problem.__name__):
        given = {one.arg: one.value.value for one in call.keywords if isinstance(one.value, ast.Constant)}
        if "code" in given:
            found.add((str(given["code"]), str(given["status"])))
    codes = {code for code, _ in found} - {kind.code for kind in error_classes()}
    return {code: ", ".join(sorted(status for one, status in found if one == code)) for code in codes}


def _codes(function: str, keyword: str = "") -> set[str]:
    """The texts that calls of a function are given as their first argument, or under a keyword."""
    found: set[str] = set()
    for tree, call in _calls(function):
        given = [one.value for one in call.keywords if one.arg == keyword] if keyword else call.args[:1]
        for argument in given:
            found |= _texts(argument)
            if isinstance(argument, ast.Name):
                found |= _assigned(tree, argument.id)
    return found


@cache
def trees() -> tuple[ast.Module, ...]:
    """The product's files, parsed."""
    return tuple(ast.parse(file.read_text()) for folder in CODE for file in sorted(folder.rglob("*.py")))


def _calls(function: str) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Every call of a function of that name in the product, with the file that it is in."""
    for tree in trees():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if getattr(call.func, "id", getattr(call.func, "attr", "")) == function:
                yield tree, call


def _assigned(tree: ast.AST, name: str) -> set[str]:
    """The texts in what is assigned to a name, or to several of which it is one."""
    pairs = [(target, node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    return {
        text
        for target, value in pairs
        if name in {getattr(one, "id", "") for one in ast.walk(target)}
        for text in _texts(value)
    }


def _texts(node: ast.AST) -> set[str]:
    """The texts in an expression that look like a code."""
    if isinstance(node, ast.IfExp):
        return _texts(node.body) | _texts(node.orelse)
    constants = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
    return {text for text in constants if isinstance(text, str) and re.fullmatch(r"[a-z]+(-[a-z]+)*", text)}


def events_page() -> str:
    return _page(
        "Events",
        "A service tells what happens: as server-sent events at `GET /v1/events`, to [webhooks](webhooks.md), and",
        "from Python with `client.events()`. Each event is one JSON object:",
        "",
        *_table(
            ("field", ""),
            (
                ("`number`", "grows by one with each event of a process; send it as `Last-Event-ID` to go on after it"),
                ("`type`", "one of the types below"),
                ("`at`", "when it happened: ISO time in UTC"),
                ("`memory`, `sandbox`", "what it is about; empty where that does not apply"),
                ("`details`", "more, by type; what is in brackets is there only where it applies"),
            ),
        ),
        "",
        *_table(
            ("type", "what happened", "details"),
            ((f"`{kind}`", about, _details(kind)) for kind, about in EVENTS.items()),
        ),
        "",
        "An `error` has `code`, `message`, `hint` and `retryable`: see [error codes](errors.md). The types of all of",
        "this are in the [OpenAPI document](../openapi.json). The last 500 events are kept for listeners that come",
        "back; a listener that is too slow misses some, and sees it by their numbers.",
    )


def _details(event: str) -> str:
    """The names of what an event of this type tells."""
    (kind,) = [kind for kind, events in DETAILS.items() if event in events]
    schema = openapi()["components"]["schemas"][kind.__name__]
    always = schema.get("required", ())
    return ", ".join(f"`{name}`" if name in always else f"(`{name}`)" for name in schema["properties"])


def metrics_page() -> str:
    metrics = Metrics()
    IndexMetrics(metrics.registry)
    rows = [
        (f"`{_shown(one)}`", one._type, ", ".join(f"`{label}`" for label in one._labelnames), f"{one._documentation}.")
        for one in metrics.registry._names_to_collectors.values()
        if isinstance(one, MetricWrapperBase)
    ]
    return _page(
        "Metrics",
        "A service has them at `GET /metrics`, in the format of Prometheus. Those whose names begin with",
        "`memory_sidecar_index_` are there only where [search](../search.md) is set up.",
        "",
        *_table(("name", "type", "labels", "what it is"), sorted(set(rows))),
        "",
        "A histogram has the series `_bucket`, `_sum` and `_count`.",
    )


def _shown(metric: MetricWrapperBase) -> str:
    """The name as it is scraped."""
    return f"{metric._name}_total" if metric._type == "counter" else metric._name


SECRET = "an example secret"
CHECK = """import hashlib
import hmac
import time


def is_genuine(secret: str, headers, body: bytes) -> bool:
    at = headers["Memory-Sidecar-Time"]
    wanted = hmac.new(secret.encode(), at.encode() + b"." + body, hashlib.sha256).hexdigest()
    fresh = abs(time.time() - int(at)) < 300
    return fresh and hmac.compare_digest(headers["Memory-Sidecar-Signature"], f"sha256={wanted}")"""


def webhooks_page() -> str:
    body = body_of(EVENT)
    headers = headers_of(EVENT.type, body, "1794824102", SECRET)
    return _page(
        "Webhooks",
        "A webhook is a POST for each [event](events.md) that its patterns match:",
        "",
        "```toml",
        "[[webhooks]]",
        'url = "https://example.com/hooks/memory"',
        'events = ["sandbox.lost", "export.*"]    # default: all',
        'secret_env = "HOOK_SECRET"               # the variable that holds the secret',
        "```",
        "",
        "Any 2xx answer means that it was taken. Otherwise it is sent again, at first after a second and then at",
        "longer and longer intervals of up to 5 minutes, for 24 hours. Events come in order and at least once: an",
        "event may come twice, so compare `number` and `at`. The event that is being sent is kept in the store until",
        "it is taken, so that the next service goes on with it.",
        "",
        "## The signature",
        "",
        "`Memory-Sidecar-Signature` is `sha256=` and the HMAC-SHA256, in hexadecimal, of the text of",
        "`Memory-Sidecar-Time`, a dot and the body as it was sent, with the secret as the key. The time is in",
        "seconds since 1970, and is that of this attempt. Without a secret the header is not sent.",
        "",
        "```python",
        *CHECK.splitlines(),
        "```",
        "",
        "## An example",
        "",
        f"With the secret `{SECRET}`, this is a call with a right signature:",
        "",
        "```http",
        "POST /hooks/memory HTTP/1.1",
        *(f"{name}: {value}" for name, value in headers.items()),
        "",
        body.decode(),
        "```",
    )


def _page(title: str, *lines: str) -> str:
    return "\n".join([MADE, f"# {title}", "", *lines, ""])


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    lines = [tuple(head), *(tuple(str(cell).replace("|", "\\|") for cell in row) for row in rows)]
    written = [f"| {' | '.join(line)} |" for line in lines]
    return [written[0], f"|{'---|' * len(lines[0])}", *written[1:]]


if __name__ == "__main__":
    for file, text in pages().items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
