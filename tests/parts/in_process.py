"""A local sandbox whose program runs in this process: the same code and answers, without starting a Python each time."""

from __future__ import annotations

import gc
import io
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from adapters.sandboxes.local import LocalSandbox
from sidecar.ports import CommandResult
from sidecar.program.main import main
from tests.parts.sent import sent_by


class InProcess(LocalSandbox):
    def __init__(self, home: Path) -> None:
        super().__init__(home.resolve())

    async def run(self, command: str, **how: Any) -> CommandResult:
        sent = sent_by(command, how.get("environment"))
        assert sent is not None
        printed = io.TextIOWrapper(io.BytesIO())
        with mock.patch.dict(os.environ, self._environment, clear=True), mock.patch.object(sys, "stdout", printed):
            try:
                code = main(*sent)
            finally:
                gc.enable()
        return CommandResult(code, printed.buffer.getvalue())
