"""The parts that a sandbox keeps, each named by its hash: the package with the in-sandbox program, and the rules.

The package is a zip of the modules of ``sidecar.format`` and ``sidecar.program`` as they are. Nothing in it is
compressed, so that the same modules make the same bytes wherever it is built; it is compressed as a whole on its way.
"""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from sidecar.format.protocol import Rules
from sidecar.layouts import Layout

ROOT = Path(__file__).parents[2]
ROOMS = ("format", "program")
_NO_TIME = (1980, 1, 1, 0, 0, 0)
"""The earliest that a zip can say."""


class Part:
    """Something that a sandbox keeps, and its name there."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.sha256 = hashlib.sha256(data).hexdigest()

    @functools.cached_property
    def packed(self) -> bytes:
        """The part as it travels."""
        return zlib.compress(self.data, 9)


@functools.cache
def build_program() -> Part:
    """Return the package with the program. It is built once, when it is first needed."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as package:
        for path in list_modules():
            member = zipfile.ZipInfo(path.relative_to(ROOT.parent).as_posix(), _NO_TIME)
            member.create_system, member.external_attr = 3, 0o644 << 16  # as on Unix, also where it is built elsewhere
            package.writestr(member, path.read_bytes())
    return Part(target.getvalue())


def list_modules() -> list[Path]:
    """List the files of the program's modules, in a stable order."""
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def build_rules(layouts: Iterable[Layout]) -> Part:
    """Return the rules with these layouts: all that the sidecar knows."""
    return _make_part(Rules([layout.for_sandbox() for layout in layouts]).encode())


@functools.lru_cache(maxsize=8)
def _make_part(data: bytes) -> Part:
    return Part(data)
