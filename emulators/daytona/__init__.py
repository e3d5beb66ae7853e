"""Daytona on loopback: its control plane and, on the same port, the toolbox of each sandbox."""

from emulators.daytona.control import DaytonaEmulator, DaytonaSandbox

__all__ = ["DaytonaEmulator", "DaytonaSandbox"]
