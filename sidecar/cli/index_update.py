"""After a command has changed a memory: update its rows in the search database, if that is quick.

Apart from ``search``, so that a command without a database does not load what searches.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace

from sidecar.cli.result import Result
from sidecar.engine import Engine
from sidecar.errors import SidecarError

CHANGING = ("export", "import", "fork", "rollback", "accept", "delete")
LATER = "The memory itself is safe; `memory-sidecar index`, its next export or a service catches up."


async def update_index(engine: Engine, args: argparse.Namespace, result: Result, seconds: float) -> Result:
    """Update the index and return the result, with a warning if that did not succeed in time."""
    if engine.index is None or args.command not in CHANGING:
        return result
    memory = args.new if args.command == "fork" else args.memory
    try:
        async with asyncio.timeout(seconds):
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
