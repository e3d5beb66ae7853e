"""The engine: the verbs export and restore, and the steps and checks that they share.

A verb is loaded when it is first asked for: a command that restores does without what exports.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidecar.engine.core import Engine
    from sidecar.engine.exports.run import ExportRequest
    from sidecar.engine.exports.steps import export, finish_export
    from sidecar.engine.restores.run import RestoreRequest
    from sidecar.engine.restores.steps import restore

__all__ = ["Engine", "ExportRequest", "RestoreRequest", "export", "finish_export", "restore"]

_MODULES = {
    "Engine": "core",
    "ExportRequest": "exports.run",
    "export": "exports.steps",
    "finish_export": "exports.steps",
    "RestoreRequest": "restores.run",
    "restore": "restores.steps",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
