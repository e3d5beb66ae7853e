"""Write what is installed down: the lock files, from pyproject.toml, and the bill of materials, from the lock file.

    python deploy/lock.py           # both, with the newest versions that pyproject.toml allows (needs the package index)
    python deploy/lock.py --bill    # the bill of materials alone

``requirements.lock`` is what the image has, ``requirements-dev.lock`` what the tests need as well: each package in one version,
with the hashes of its files. ``deploy/sbom.cdx.json`` lists the packages of the image as CycloneDX has it. Where packages come
from is in none of them: that is for pip's configuration.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK, DEV_LOCK, BILL = ROOT / "requirements.lock", ROOT / "requirements-dev.lock", ROOT / "deploy" / "sbom.cdx.json"
OWN = "memory-sidecar"
HEADER = "# Written by `make lock` from pyproject.toml. Install it with: pip install --require-hashes -r {}\n"
PYTHON = "3.11"
"""The oldest that is supported. The files hold for all newer ones too."""


@dataclass
class Package:
    """A package of a lock file."""

    name: str
    version: str
    marker: str = ""
    hashes: list[str] = field(default_factory=list)
    needed_by: list[str] = field(default_factory=list)


def read_lock(text: str) -> list[Package]:
    """Return the packages of a lock file. Raise ``ValueError`` for a line that is none of its kinds."""
    packages: list[Package] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#") or line == "    # via":
            continue
        begun = re.fullmatch(r"([a-z0-9.-]+)==([^ ;]+)(?: ; ([^\\]+?))?(?: \\)?", line)
        hashed = re.fullmatch(r"    --hash=sha256:([0-9a-f]{64})(?: \\)?", line)
        needed = re.fullmatch(r"    #(?: via)? +([A-Za-z0-9._-]+)(?: \(.*\))?", line)
        if begun:
            packages.append(Package(begun[1], begun[2], begun[3] or ""))
        elif hashed:
            packages[-1].hashes.append(hashed[1])
        elif needed:
            packages[-1].needed_by.append(needed[1])
        else:
            raise ValueError(f"This is no line of a lock file: {line}")
    return packages


def build_bill(packages: list[Package], version: str) -> dict[str, Any]:
    """Return the bill of materials of the image: the same for the same packages, so it has no date and no number."""

    def refer(name: str, version: str) -> str:
        return f"pkg:pypi/{name}@{version}"

    refs = {package.name: refer(package.name, package.version) for package in packages}
    refs[OWN] = refer(OWN, version)
    needs: dict[str, list[str]] = {name: [] for name in refs}
    for package in packages:
        for name in package.needed_by:
            needs[name].append(refs[package.name])
    components = []
    for package in packages:
        ref = refs[package.name]
        component = {"type": "library", "bom-ref": ref, "name": package.name, "version": package.version, "purl": ref}
        marker = [{"name": "python:marker", "value": package.marker}] if package.marker else []
        components.append({**component, "properties": marker} if marker else component)
    own = {"type": "application", "bom-ref": refs[OWN], "name": OWN, "version": version, "purl": refs[OWN]}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**own, "licenses": [{"license": {"id": "Apache-2.0"}}]}},
        "components": components,
        "dependencies": [{"ref": ref, "dependsOn": sorted(needs[name])} for name, ref in sorted(refs.items())],
    }


def write_bill() -> None:
    version = read_project()["project"]["version"]
    bill = build_bill(read_lock(LOCK.read_text("utf-8")), version)
    BILL.write_text(json.dumps(bill, indent=1) + "\n", "utf-8")


def write_locks() -> None:
    """Resolve with uv, in an environment of its own that is thrown away."""
    project = read_project()
    dev = [row for row in project["dependency-groups"]["dev"] if not row.startswith(OWN)]
    with tempfile.TemporaryDirectory(prefix="memory-sidecar-lock-") as folder:
        venv.create(folder, with_pip=True)
        subprocess.run([f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "uv"], check=True)
        more = Path(folder, "dev.in")
        more.write_text("\n".join([*dev, ""]), "utf-8")
        for lock, inputs in ((LOCK, []), (DEV_LOCK, [str(more), f"--constraint={LOCK}"])):
            made = Path(folder, lock.name)
            words = ["uv", "pip", "compile", "pyproject.toml", "--all-extras", *inputs, "--upgrade", "--quiet"]
            words += ["--universal", f"--python-version={PYTHON}", "--generate-hashes", f"--output-file={made}"]
            words += ["--no-header", "--no-emit-index-url", "--no-emit-find-links"]
            if lock == DEV_LOCK:
                words.append("--no-annotate")  # it would name this folder
            subprocess.run([f"{folder}/bin/{words[0]}", *words[1:]], cwd=ROOT, check=True)
            lock.write_text(HEADER.format(lock.name) + made.read_text("utf-8"), "utf-8")


def read_project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the lock files and the bill of materials.")
    parser.add_argument(
        "--bill", action="store_true", help="the bill of materials alone, from the lock file that is there"
    )
    if not parser.parse_args().bill:
        write_locks()
    write_bill()


if __name__ == "__main__":
    sys.exit(main())
