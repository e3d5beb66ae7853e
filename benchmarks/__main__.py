"""``python -m benchmarks [--quick] [--write] [PART …]``"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import arrivals, encryption, large, providers, reading, search, service, tenants, warm
from benchmarks.table import Section

RESULTS = Path(__file__).with_name("results.md")
MB = 1_000_000

FULL: dict[str, Callable[[Path], Section]] = {
    "large": lambda folder: large.measure(folder, 2000 * MB),
    "conversations": lambda folder: warm.measure_conversations(folder, 50 * MB, 10),
    "files": lambda folder: warm.measure_small_files(folder, 8415),
    "providers": lambda folder: providers.measure(folder, 50 * MB),
    "service": lambda folder: service.measure(folder, 200, 10 * MB),
    "encryption": lambda folder: encryption.measure(folder, 200 * MB, 5),
    "tenants": lambda folder: tenants.measure(folder, 6000, 40),
    "reading": lambda folder: reading.measure(folder, 50 * MB, 100),
    "arrivals": lambda folder: arrivals.measure(folder, 200, 60),
    "search": lambda folder: search.measure(folder, 1_000_000),
}
QUICK: dict[str, Callable[[Path], Section]] = {
    "large": lambda folder: large.measure(folder, 60 * MB),
    "conversations": lambda folder: warm.measure_conversations(folder, 5 * MB, 3),
    "files": lambda folder: warm.measure_small_files(folder, 1000),
    "providers": lambda folder: providers.measure(folder, 5 * MB),
    "service": lambda folder: service.measure(folder, 10, 1 * MB),
    "encryption": lambda folder: encryption.measure(folder, 20 * MB, 1),
    "tenants": lambda folder: tenants.measure(folder, 600, 5),
    "reading": lambda folder: reading.measure(folder, 5 * MB, 10),
    "arrivals": lambda folder: arrivals.measure(folder, 6, 2),
    "search": lambda folder: search.measure(folder, 50_000),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure the sidecar and print a table.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(FULL)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small sizes: seconds instead of minutes")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} too")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(FULL):
        parser.error(f"there is no part {min(unknown)!r}")
    text = _heading(options.quick)
    print(text)
    for name in options.parts or FULL:
        with tempfile.TemporaryDirectory(prefix="sidecar-bench-") as folder:
            section = (QUICK if options.quick else FULL)[name](Path(folder))
        print(section.markdown(), flush=True)
        text += "\n" + section.markdown()
    if options.write:
        RESULTS.write_text(text)
    return 0


def _heading(quick: bool) -> str:
    about = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    return (
        f"# Measured on {datetime.now(UTC):%Y-%m-%d}{' (quick)' if quick else ''}\n\n"
        f"{about}. Times are of whole commands, Python's start included, and vary with the machine;\n"
        "hold them against what is beside them, which ran on the same data in the same run.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
