"""``python -m benchmarks [--quick] [--write] [PART …]``"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import (
    arrivals,
    encryption,
    far,
    growth,
    large,
    peers,
    providers,
    reading,
    search,
    service,
    start,
    tenants,
    warm,
)
from benchmarks.table import Section

RESULTS = Path(__file__).with_name("results.md")
PLOTS = Path(__file__).resolve().parents[1] / "docs/plots"
PART = re.compile(r"^<!-- part: (\S+) -->\n", re.MULTILINE)
"""Before each section of the results: the part it comes from."""
MB = 1_000_000

FULL: dict[str, Callable[[Path], Section]] = {
    "peers": lambda folder: peers.measure(folder, 1, 5),
    "start": lambda folder: start.measure(folder, 15),
    "growth": lambda folder: growth.measure(folder, 1, 40, (1, 25, 50, 100, 200), folder / "plots"),
    "large": lambda folder: large.measure(folder, 2000 * MB),
    "conversations": lambda folder: warm.measure_conversations(folder, 50 * MB, 10),
    "files": lambda folder: warm.measure_small_files(folder, 8415),
    "providers": lambda folder: providers.measure(folder, 50 * MB),
    "service": lambda folder: service.measure(folder, 200, 10 * MB),
    "far": lambda folder: far.measure(folder, 10 * MB, (500, 10_000), 10_000, 10),
    "encryption": lambda folder: encryption.measure(folder, 200 * MB, 5),
    "tenants": lambda folder: tenants.measure(folder, 6000, 40),
    "reading": lambda folder: reading.measure(folder, 50 * MB, 100),
    "arrivals": lambda folder: arrivals.measure(folder, 200, 60),
    "search": lambda folder: search.measure(folder, 1_000_000),
}
QUICK: dict[str, Callable[[Path], Section]] = {
    "peers": lambda folder: peers.measure(folder, 0.05, 1),
    "start": lambda folder: start.measure(folder, 2),
    "growth": lambda folder: growth.measure(folder, 0.05, 3, (1, 5), folder / "plots"),
    "large": lambda folder: large.measure(folder, 60 * MB),
    "conversations": lambda folder: warm.measure_conversations(folder, 5 * MB, 3),
    "files": lambda folder: warm.measure_small_files(folder, 1000),
    "providers": lambda folder: providers.measure(folder, 5 * MB),
    "service": lambda folder: service.measure(folder, 10, 1 * MB),
    "far": lambda folder: far.measure(folder, 1 * MB, (20,), 50, 2, idle=3),
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
    heading = _heading(options.quick)
    print(heading)
    found: dict[str, str] = {}
    for name in options.parts or FULL:
        with tempfile.TemporaryDirectory(prefix="sidecar-bench-") as folder:
            section = (QUICK if options.quick else FULL)[name](Path(folder))
            if options.write and (drawn := Path(folder) / "plots").is_dir():
                shutil.copytree(drawn, PLOTS, dirs_exist_ok=True)
        found[name] = section.markdown()
        print(found[name], flush=True)
        if options.write:
            _write(heading, found)
    return 0


def _write(heading: str, found: dict[str, str]) -> None:
    """Write the results. The sections of parts that were not measured stay as they are, with their own date."""
    pieces = PART.split(RESULTS.read_text())
    kept = {name: text.strip() + "\n" for name, text in zip(pieces[1::2], pieces[2::2], strict=True)}
    when = heading.partition("Measured on ")[2].partition("\n")[0]
    kept |= {name: f"{text.strip()}\n\n{_tell_when(when, name)}\n" for name, text in found.items()}
    parts = "\n".join(f"<!-- part: {name} -->\n{kept[name]}" for name in FULL if name in kept)
    RESULTS.write_text(f"{heading.replace('Measured on', 'Measured, the last of it on')}\n{parts}")


def _tell_when(when: str, name: str) -> str:
    """Say how a part was measured: on a busy machine only what is by turns can be compared, and best its CPU time."""
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return f"Measured on {when}, by `python -m benchmarks {name}`. The machine's load at its end: {load}."


def _heading(quick: bool) -> str:
    about = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    return (
        f"# Measured on {datetime.now(UTC):%Y-%m-%d}{' (quick)' if quick else ''}\n\n"
        f"{about}. Times are of whole commands, Python's start included, and vary with the machine;\n"
        "hold them against what is beside them, which ran on the same data in the same run.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
