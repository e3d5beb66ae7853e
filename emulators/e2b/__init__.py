"""E2B on loopback: its control plane and, on the same port, the daemon inside each sandbox."""

from emulators.e2b.control import E2BEmulator, E2BSandbox

__all__ = ["E2BEmulator", "E2BSandbox"]
