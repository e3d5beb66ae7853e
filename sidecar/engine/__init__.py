"""The two verbs, and what they share."""

from sidecar.engine.export import export
from sidecar.engine.exporting import ExportRequest
from sidecar.engine.parts import Engine
from sidecar.engine.placing import RestoreRequest
from sidecar.engine.restore import restore

__all__ = ["Engine", "ExportRequest", "RestoreRequest", "export", "restore"]
