"""A folder on this machine as a sandbox: what only it can promise."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from adapters.sandboxes.local import open_local
from sidecar.errors import SandboxTimeout


async def test_what_a_command_leaves_running_is_ended_when_its_time_is_over(tmp_path: Path) -> None:
    """The shell is gone long before its child, which still has the pipe: both are ours."""
    box = open_local(str(tmp_path))
    with pytest.raises(SandboxTimeout):
        await box.run("sleep 54321 & echo $! > child", timeout=1, output_limit=100)
    child = int((tmp_path / "child").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(60):
            os.kill(child, 0)
            await asyncio.sleep(0.05)
