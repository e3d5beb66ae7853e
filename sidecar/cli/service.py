"""``serve``: run the sidecar as a service."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from sidecar.cli.result import Result
from sidecar.config.settings import add_location, find_config_file, load_config
from sidecar.engine import Engine
from sidecar.errors import BadConfig
from sidecar.host.local_token import find_token_path, read_token
from sidecar.host.loopback import is_loopback
from sidecar.host.work import NoProgress
from sidecar.service.door.tokens import load_tokens
from sidecar.service.server import ServiceConfig, serve
from sidecar.service.settings import AUTO, Service, parse_address

SERVING = """Serving at {url} (the API: {url}/openapi.json).
{page}
"""
TRY = """Try it in another terminal: a sample home is saved, and its memory comes back in another one.
  d=$(mktemp -d); mkdir $d/second; {command} demo --home $d/first
  {export}
  {restore}
  cat $d/second/MEMORY.md
"""
LIST = """A call that tries it:
  curl -sS {url}/v1/memories{token}
"""
POST = "curl -sS -X POST {url}/v1/memories/sample/{verb}s{token} -H content-type:application/json"
SANDBOX = """ -d '{{"sandbox": "local:'$d/{home}'"}}'; echo"""
CLIENT = "{python} -c 'import sys, sidecar.client as c; print(c.Client(sys.argv[1]).{verb}({named}))' {url} $d/{home}"
NAMED = '"sample", sandbox="local:" + sys.argv[2]'


async def run_serve(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``serve`` until it is told to stop."""
    config = load_config(args.config, store=args.store)
    settings = config.service
    if args.bind:
        settings = replace(settings, bind=args.bind)

    def ready(url: str) -> None:
        print(SERVING.format(url=url, page=_describe_page(settings, url)) + _describe_calls(settings, url), flush=True)

    try:
        service = ServiceConfig(
            service=settings,
            webhooks=config.webhooks,
            index_every=config.postgres.every,
            adopt=config.adopt.folder,
            start=config.start,
            watch=config.watch,
            audit=config.audit,
        )
        code = await serve(replace(engine, progress=NoProgress()), service, ready=ready)
    except BadConfig as problem:
        raise add_location(problem, find_config_file(args.config)) from None
    if code:
        # The time is over, and a regular exit would wait for what still runs. The store is consistent, as after any
        # crash.
        os._exit(code)
    return Result({}, [], code)


def _describe_calls(settings: Service, url: str) -> str:
    """Return commands to try the service with. Not every service allows folders of this machine as sandboxes; for
    those, a call that lists memories."""
    if settings.local_roots or not is_loopback(parse_address(settings.bind)[0]):
        return LIST.format(url=url, token=_build_token_option(settings))
    return TRY.format(
        command=find_own_command(),
        export=_build_call(settings, url, "export", "first"),
        restore=_build_call(settings, url, "restore", "second"),
    )


def _build_call(settings: Service, url: str, verb: str, home: str) -> str:
    """Build a call with curl or, if it is not installed, with the Python client."""
    if shutil.which("curl"):
        return POST.format(url=url, verb=verb, token=_build_token_option(settings)) + SANDBOX.format(home=home)
    return CLIENT.format(python=shlex.quote(sys.executable), verb=verb, named=NAMED, url=url, home=home)


def find_own_command() -> str:
    """Return what to type to run this program: its name, if the PATH leads to it."""
    script = Path(sys.executable).parent / "memory-sidecar"
    found = shutil.which("memory-sidecar")
    if found and Path(found).resolve() == script.resolve():
        return "memory-sidecar"
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(sys.executable)} -m sidecar"


def _describe_page(settings: Service, url: str) -> str:
    """Return where the web page is. The link with the token is printed to a terminal only: other output may be kept
    where other people read it."""
    if not _uses_kept_token(settings):
        return f"A page for people: {url}"
    if sys.stdout.isatty():
        return f"A page for people: {url}/#token={read_token()}\nThe token is kept in {find_token_path()}."
    return f"A page for people: {url} (it asks for the token, which is kept in {find_token_path()})."


def _build_token_option(settings: Service) -> str:
    """Return the option that a call with curl needs for the token."""
    if os.environ.get("MEMORY_SIDECAR_TOKEN"):
        said = "${MEMORY_SIDECAR_TOKEN%%,*}"
    elif settings.token_file:
        said = f"$(head -n 1 {shlex.quote(settings.token_file)})"
    elif _uses_kept_token(settings):
        said = f"$(cat {shlex.quote(str(find_token_path()))})"
    else:
        return ""
    return f' -H "authorization: Bearer {said}"'


def _uses_kept_token(settings: Service) -> bool:
    """Whether the service uses the token that is kept for this user."""
    return settings.token == AUTO and not load_tokens(settings.token_file)
