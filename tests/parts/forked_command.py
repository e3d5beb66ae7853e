"""The program of local sandboxes, forked from a process that has it loaded: a real one, for half of the CPU."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from pathlib import Path

from adapters.sandboxes import local
from adapters.sandboxes.local import Command
from sidecar.engine.sandbox import delivery
from sidecar.errors import OutputTooLarge
from sidecar.ports import CommandResult
from tests.parts import forked_sidecar
from tests.parts.sent import sent_by

PIECE = re.compile(re.escape(delivery.PIECE) + r"\d+\Z")


class ForkedCommand(Command):
    """A command in a local sandbox. One that is not our installed program, run by the usual Python, is run as it is."""

    def run(self, script: str) -> CommandResult:
        sent = sent_by(script, self._environment)
        usual = self._environment.get("PATH", "").split(os.pathsep)[0] == str(Path(sys.executable).parent)
        ours = delivery._BEGIN + delivery._FIND + delivery._RUN in script
        if sent is None or not sent.request or not usual or not ours or not self._home.is_dir():
            return super().run(script)
        process = forked_sidecar.Sidecar(
            [sent.nonce, *(base64.b64encode(part).decode() for part in sent[1:])],
            kind="program",
            cwd=self._home,
            env={name: value for name, value in self._environment.items() if not PIECE.match(name)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with self._lock:
            self._process = process  # type: ignore[assignment]
        if self._ended:
            self.end()
        output, complaint = process.communicate()
        with self._lock:
            self._process = None
        if len(output) > self._limit:
            raise OutputTooLarge(f"The sandbox printed more than {self._limit} bytes.")
        return CommandResult(process.wait(), output, complaint.decode("utf-8", "replace"))


def fork_programs(address: str) -> None:
    """Fork them in this process, from now on, at this address."""
    forked_sidecar.known["program"] = address
    forked_sidecar.programs_are_forked = True
    local.Command = ForkedCommand  # type: ignore[misc]
