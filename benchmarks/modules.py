"""Which of our modules a warm export passes: ``python benchmarks/modules.py [TREE]``, by a profile hook.

A module counts if one of its functions runs between the call of ``export`` and the receipt: outside the sandbox, or in it.
Bodies of modules and classes, which run when something is imported, do not. The memory is claude-mem's with a database, some
files and a project; the store is a folder, with no settings. The export that is counted is the third: the first is
not warm, and by then all that is imported late has been. TREE may be the tree of any commit: it is run with its own code.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("sidecar/", "adapters/", "inside/")
EXPORTS = 3
TICK_SECONDS = 0.2
"""A file younger than a tick of the clock is read again, changed or not."""

# Runs what the sandbox's Python was asked to run, and writes down what it passed. The program ends by ``os._exit``.
_TRACED = """import os, sys, threading
seen, leave = set(), os._exit
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & 1: seen.add(frame.f_code.co_filename)
def end(code):
    with open({out!r}, "a") as file: file.write("".join(name + chr(10) for name in seen))
    leave(code)
while sys.argv[1] != "-c": del sys.argv[1]
code = sys.argv[2]
sys.argv = ["-c", *sys.argv[3:]]
os._exit = end
sys.setprofile(note), threading.setprofile(note)
exec(compile(code, "<string>", "exec"), {{"__name__": "__main__"}})
"""


def count(tree: Path = ROOT) -> dict[str, list[str]]:
    """Return the modules that a warm export passes with the code of a tree: "outside" the sandbox and "inside"."""
    ran = subprocess.run([sys.executable, __file__, "--here"], cwd=tree, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, list[str]] = json.loads(ran.stdout)
    return found


async def _export_and_count(folder: Path) -> dict[str, list[str]]:
    """Export three times with the code of the present folder, and return what the third passed."""
    sys.path.insert(0, os.getcwd())
    from adapters.sandboxes import local
    from sidecar.engine import ExportRequest, export
    from tests.parts.memories import engine_on, grow, plain_home

    home, out, seen = folder / "home", folder / "passed", set[str]()
    plain_home(home)
    engine = engine_on(f"file:{folder}/store")
    opened: Any = getattr(local, "open_local", None) or (lambda place: local.LocalSandbox(Path(place)))

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            seen.add(frame.f_code.co_filename)

    threading.setprofile(note)  # from the first on: a thread that works for all of them is asked only when it begins
    for number in range(EXPORTS):
        if number:
            grow(home)
        await asyncio.sleep(TICK_SECONDS)
        sandbox, last = opened(str(home)), number == EXPORTS - 1
        if last:
            sandbox._environment["PATH"] = f"{_put_python(folder, out)}:{sandbox._environment['PATH']}"
            seen.clear(), sys.setprofile(note)
        receipt = await export(engine, sandbox, ExportRequest(memory="counted"))
        sys.setprofile(None)
        assert receipt.outcome == "committed", receipt
    return {"outside": _name_ours(seen), "inside": _name_ours(out.read_text().splitlines())}


def _put_python(folder: Path, out: Path) -> Path:
    """Put a ``python3`` into a folder that writes what it passes to ``out``. Return the folder."""
    place = folder / "bin"
    place.mkdir()
    (place / "traced.py").write_text(_TRACED.format(out=str(out)))
    words = (sys.executable, "-I", "-S", f"{place}/traced.py")
    (place / "python3").write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    (place / "python3").chmod(0o755)
    return place


def _name_ours(files: Any) -> list[str]:
    """Return the modules of ours among these, by their paths in the tree."""
    names = {str(file).removeprefix(f"{os.getcwd()}/").strip("<>") for file in files}
    return sorted(name for name in names if name.startswith(ROOMS))


def main() -> int:
    if sys.argv[1:] == ["--here"]:
        with tempfile.TemporaryDirectory(prefix="sidecar-count-") as folder:
            print(json.dumps(asyncio.run(_export_and_count(Path(folder)))))
        return 0
    found = count(Path(*sys.argv[1:] or [ROOT]).resolve())
    outside, inside = found["outside"], found["inside"]
    for name in sorted({*outside, *inside}):
        print(f"{'o' if name in outside else ' '} {'i' if name in inside else ' '} {name}")
    print(f"outside: {len(outside)}, inside: {len(inside)}, both together: {len({*outside, *inside})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
