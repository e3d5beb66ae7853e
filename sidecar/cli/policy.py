"""What a policy is compared with before anything is served by it."""

from __future__ import annotations

import argparse

from sidecar.config import config_file, placed
from sidecar.engine import Engine
from sidecar.engine.hot import check_hot
from sidecar.errors import BadConfig


async def check_policy(engine: Engine, args: argparse.Namespace) -> None:
    """Refuse limits that what is in the store has outgrown already. Raise ``BadConfig`` with the line to change."""
    try:
        await check_hot(engine)
    except BadConfig as problem:
        raise placed(problem, config_file(args.config)) from None
