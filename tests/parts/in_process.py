"""A local sandbox whose program runs in this process: the same code and answers, without starting a Python each time."""

from __future__ import annotations

import base64
import gc
import io
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

from adapters.sandboxes.local import LocalSandbox
from sidecar.ports import CommandResult
from sidecar.program.main import main
from tests.parts.forgery import request_in


class InProcess(LocalSandbox):
    def __init__(self, home: Path) -> None:
        super().__init__(home.resolve())

    async def run(self, command: str, **how: Any) -> CommandResult:
        text = base64.b64encode(zlib.compress(json.dumps(request_in(command)).encode(), 1)).decode()
        printed = io.TextIOWrapper(io.BytesIO())
        with mock.patch.dict(os.environ, {"HOME": str(self.home)}), mock.patch.object(sys, "stdout", printed):
            try:
                code = main(text)
            finally:
                gc.enable()
        return CommandResult(code, printed.buffer.getvalue())
