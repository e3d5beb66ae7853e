"""``serve``: the sidecar as a service."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

from sidecar.cli.result import Result
from sidecar.config import load_config
from sidecar.engine import Engine
from sidecar.progress import Unwatched
from sidecar.service.server import serve

TRY = """
Serving at {url}. Try it:
  curl -X POST {url}/v1/memories/me/exports  -H 'content-type: application/json' -d '{{"sandbox": "local:/path/to/home"}}'
  curl -X POST {url}/v1/memories/me/restores -H 'content-type: application/json' -d '{{"sandbox": "local:/path/to/other"}}'
  curl {url}/v1/memories
"""


async def run_serve(engine: Engine, args: argparse.Namespace) -> Result:
    settings = load_config(args.config, store=args.store).service
    if args.bind:
        settings = replace(settings, bind=args.bind)

    def ready(url: str) -> None:
        if sys.stdout.isatty():
            print(TRY.format(url=url), flush=True)

    code = await serve(replace(engine, progress=Unwatched()), settings, ready=ready)
    if code:
        # The time is up, and what still runs would take more of it. The store is as good as after any crash.
        os._exit(code)
    return Result({}, [], code)
