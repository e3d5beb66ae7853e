"""Import the program's modules from its package: a zip that was read into memory and checked there, and is not read
again.

The first piece of the package that runs, so it imports nothing of it.
"""

from __future__ import annotations

import sys
import zipfile
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Optional


class PackageImporter:
    """Finds and loads modules in an open package. Each is compiled when it is first imported."""

    def __init__(self, package: zipfile.ZipFile) -> None:
        self._package = package
        self._files = set(package.namelist())

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """Return the spec of a module in the package; ``None`` if it has none of that name."""
        place = name.replace(".", "/")
        for file, is_folder in ((place + "/__init__.py", True), (place + ".py", False)):
            if file in self._files:
                return ModuleSpec(name, self, origin=file, is_package=is_folder)  # type: ignore[arg-type]
        if any(file.startswith(place + "/") for file in self._files):  # a folder without a module of its own
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Run a module's code."""
        file = module.__spec__.origin if module.__spec__ is not None else None
        if file is not None:
            exec(compile(self._package.read(file), "<%s>" % file, "exec", dont_inherit=True), module.__dict__)


def install(package: zipfile.ZipFile) -> None:
    """Make the modules of this package the ones that are imported."""
    sys.meta_path.insert(0, PackageImporter(package))
