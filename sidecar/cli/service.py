"""``serve``: the sidecar as a service."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import replace

from sidecar.cli.result import Result
from sidecar.config import config_file, load_config, placed
from sidecar.engine import Engine
from sidecar.errors import BadConfig
from sidecar.local_token import read_token, token_path
from sidecar.progress import Unwatched
from sidecar.service.server import serve
from sidecar.service.settings import AUTO, Service
from sidecar.service.tokens import load_tokens

TRY = """Serving at {url} (the API: {url}/openapi.json).
{page}
Three calls that try it, with a home of yours as the sandbox:
  curl -X POST {url}/v1/memories/me/exports{token} -H content-type:application/json -d '{{"sandbox": "local:'$HOME'"}}'
  curl -X POST {url}/v1/memories/me/restores{token} -H content-type:application/json -d '{{"sandbox": "local:'$(mktemp -d)'"}}'
  curl {url}/v1/memories{token}
"""


async def run_serve(engine: Engine, args: argparse.Namespace) -> Result:
    config = load_config(args.config, store=args.store)
    settings = config.service
    if args.bind:
        settings = replace(settings, bind=args.bind)

    def ready(url: str) -> None:
        print(TRY.format(url=url, page=_page(settings, url), token=_token(settings)), flush=True)

    try:
        code = await serve(
            replace(engine, progress=Unwatched()),
            settings,
            config.webhooks,
            ready=ready,
            index_every=config.postgres.every,
        )
    except BadConfig as problem:
        raise placed(problem, config_file(args.config)) from None
    if code:
        # The time is up, and what still runs would take more of it. The store is as good as after any crash.
        os._exit(code)
    return Result({}, [], code)


def _page(settings: Service, url: str) -> str:
    """Where a person can look. A link with the token is for a terminal alone: other output may be kept for others to read."""
    if not _is_kept(settings):
        return f"A page for people: {url}"
    if sys.stdout.isatty():
        return f"A page for people: {url}/#token={read_token()}\nThe token is kept in {token_path()}."
    return f"A page for people: {url} (it asks for the token, which is kept in {token_path()})."


def _token(settings: Service) -> str:
    """What a call with curl has to add."""
    if os.environ.get("MEMORY_SIDECAR_TOKEN"):
        said = "${MEMORY_SIDECAR_TOKEN%%,*}"
    elif settings.token_file:
        said = f"$(head -n 1 {shlex.quote(settings.token_file)})"
    elif _is_kept(settings):
        said = f"$(cat {shlex.quote(str(token_path()))})"
    else:
        return ""
    return f' -H "authorization: Bearer {said}"'


def _is_kept(settings: Service) -> bool:
    """Whether the service uses the token that is kept for this user."""
    return settings.token == AUTO and not load_tokens(settings.token_file)
