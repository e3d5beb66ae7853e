"""``serve``: the sidecar as a service."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from sidecar.cli.policy import check_policy
from sidecar.cli.result import Result
from sidecar.config import load_config
from sidecar.engine import Engine
from sidecar.progress import Unwatched
from sidecar.service.server import serve

TRY = """Serving at {url} (a page for people; the API: {url}/openapi.json).
Three calls that try it, with a home of yours as the sandbox:
  curl -X POST {url}/v1/memories/me/exports{token} -H content-type:application/json -d '{{"sandbox": "local:'$HOME'"}}'
  curl -X POST {url}/v1/memories/me/restores{token} -H content-type:application/json -d '{{"sandbox": "local:'$(mktemp -d)'"}}'
  curl {url}/v1/memories{token}
"""


async def run_serve(engine: Engine, args: argparse.Namespace) -> Result:
    config = load_config(args.config, store=args.store)
    await check_policy(engine, args)
    settings = config.service
    if args.bind:
        settings = replace(settings, bind=args.bind)

    def ready(url: str) -> None:
        token = " -H 'authorization: Bearer '$MEMORY_SIDECAR_TOKEN" if os.environ.get("MEMORY_SIDECAR_TOKEN") else ""
        print(TRY.format(url=url, token=token), flush=True)

    code = await serve(
        replace(engine, progress=Unwatched()), settings, config.webhooks, ready=ready, index_every=config.postgres.every
    )
    if code:
        # The time is up, and what still runs would take more of it. The store is as good as after any crash.
        os._exit(code)
    return Result({}, [], code)
