"""E2B and Daytona on loopback, for the unmodified SDKs: real files, real processes, and trouble on demand.

    with E2BEmulator() as server:
        os.environ.update(server.environment())
        sandbox = e2b.Sandbox.create()
        server.faults.add(Fault("download", "cut", after=1000))

Nothing here isolates anything: commands run as whoever runs the server.
"""

from emulators.calls import Call
from emulators.daytona import DaytonaEmulator, DaytonaSandbox
from emulators.e2b import E2BEmulator, E2BSandbox
from emulators.faults import Fault

__all__ = ["Call", "DaytonaEmulator", "DaytonaSandbox", "E2BEmulator", "E2BSandbox", "Fault"]
