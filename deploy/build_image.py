"""Build the image; where no public image can be pulled, on a base made with debootstrap.

    python deploy/build_image.py                         # on python:3.13-slim, with docker or podman
    python deploy/build_image.py --local-base --nested   # as root, inside a container, with podman and debootstrap

With podman, pip's configuration on this machine (an index of your own, its certificate) holds during the build. It is
mounted, not copied: all that is left of it in the image is an empty /etc/pip.conf.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from engine import Engine

ROOT = Path(__file__).resolve().parent.parent
LOCAL_BASE = "localhost/memory-sidecar-base"
PACKAGES = "python3,python3-venv,ca-certificates"
FILES = ("cert", "client-cert", "find-links")
"""The settings of pip that name something on this machine's disk."""
PASSED_ON = (*FILES, "index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout")


def make_local_base(engine: Engine, suite: str) -> str:
    """A small Debian with Python as an image, unless it is there already. Return its name."""
    name = f"{LOCAL_BASE}:{suite}"
    if engine.ask("image", "inspect", name).returncode == 0:
        return name
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        sys.exit("--local-base needs root and debootstrap.")
    with tempfile.TemporaryDirectory(prefix="memory-sidecar-base-") as folder:
        tree, tarball = f"{folder}/tree", f"{folder}/tree.tar"
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, tree], check=True)
        shutil.rmtree(f"{tree}/var/cache/apt/archives", ignore_errors=True)
        subprocess.run(["tar", "-C", tree, "-cf", tarball, "."], check=True)
        engine.tell("import", tarball, name)
    return name


def pip_settings() -> dict[str, str]:
    """What pip is told on this machine, by files and by the environment, the latter winning."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(:env:|global|install)\.([a-z-]+)=('.*'|\".*\")$", listed, re.MULTILINE)
    ordered = sorted(found, key=lambda row: row[0] == ":env:")
    return {name: ast.literal_eval(value) for _, name, value in ordered if name in PASSED_ON}


def pip_mounts(folder: Path) -> list[str]:
    """The options that make a build use them."""
    settings = pip_settings()
    mounts = []
    for name in FILES:
        if name in settings and not Path(settings[name]).exists():
            del settings[name]
        elif name in settings:
            mounts.append(f"--volume={settings[name]}:{settings[name]}:ro")
    file = folder / "pip.conf"
    lines = [f"{name} = {value.replace(chr(10), chr(10) + '    ')}" for name, value in settings.items()]
    file.write_text("\n".join(["[global]", *lines, ""]))
    return [f"--volume={file}:/etc/pip.conf:ro", *mounts]


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the image.")
    parser.add_argument("--tag", default="memory-sidecar:local")
    parser.add_argument("--base", help="an image with Python 3.11 or newer")
    parser.add_argument("--digest", help="the digest that the base must have: sha256:…")
    parser.add_argument("--local-base", action="store_true", help="make the base with debootstrap")
    parser.add_argument("--suite", default="bookworm", help="the Debian release of that base")
    parser.add_argument("--nested", action="store_true", help="this machine is a container itself")
    args = parser.parse_args()

    engine = Engine(nested=args.nested)
    base = make_local_base(engine, args.suite) if args.local_base else args.base
    with tempfile.TemporaryDirectory(prefix="memory-sidecar-build-") as folder:
        mounts = pip_mounts(Path(folder)) if engine.is_podman else []
        chosen = {"BASE": base, "DIGEST": args.digest}
        options = [f"--build-arg={name}={value}" for name, value in chosen.items() if value]
        engine.build(*mounts, *options, "--tag", args.tag, str(ROOT))
    print(f"Built {args.tag}.")


if __name__ == "__main__":
    main()
