"""The engine: the verbs export and restore, and the steps and checks that they share."""

from sidecar.engine.core import Engine
from sidecar.engine.exports.run import ExportRequest
from sidecar.engine.exports.steps import export, finish_export
from sidecar.engine.restores.run import RestoreRequest
from sidecar.engine.restores.steps import restore

__all__ = ["Engine", "ExportRequest", "RestoreRequest", "export", "finish_export", "restore"]
