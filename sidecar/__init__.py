"""The memory sidecar: an agent's memory outlives its sandbox."""

__version__ = "0.1.0"
