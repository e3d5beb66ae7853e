"""What sealing costs: the same export and restore with and without keys, by turns in the same run."""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import homes
from benchmarks.measure import Run, bytes_in, sidecar
from benchmarks.table import Section, seconds, size

KINDS = ("plain", "encrypted", "encrypted and signed")


@dataclass(frozen=True, slots=True)
class Turn:
    exported: Run
    restored: Run


def turns(folder: Path, total: int, rounds: int) -> dict[str, list[Turn]]:
    """Each kind of store in turn, ``rounds`` times, so that what else the machine does falls on all of them alike."""
    home, temporary = folder / "home", folder / "tmp"
    homes.large(home, total, homes.Words(3, 32 << 20))
    temporary.mkdir()
    done: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind in KINDS:
            with _environment(folder, kind):
                turn = _travel(folder, f"file:{folder}/{kind.replace(' ', '-')}-{number}", temporary)
            if number:  # the first round only fills the caches
                done[kind].append(turn)
    return done


def measure(folder: Path, total: int, rounds: int) -> Section:
    done = turns(folder, total, rounds)
    section = Section(f"Sealing {size(bytes_in(folder / 'home'))}, the median of {rounds}")
    plain = (
        _median(run.exported.seconds for run in done["plain"]),
        _median(run.restored.seconds for run in done["plain"]),
    )
    for kind, runs in done.items():
        exported, restored = (
            _median(run.exported.seconds for run in runs),
            _median(run.restored.seconds for run in runs),
        )
        peaks = max(run.exported.peak for run in runs), max(run.restored.peak for run in runs)
        section.add(
            f"export, {kind}", f"{seconds(exported)}, peak RSS {size(peaks[0])}", f"{exported / plain[0]:.2f} ×"
        )
        section.add(
            f"restore, {kind}", f"{seconds(restored)}, peak RSS {size(peaks[1])}", f"{restored / plain[1]:.2f} ×"
        )
    return section


def _median(values: Iterator[float]) -> float:
    return statistics.median(values)


def _travel(folder: Path, url: str, temporary: Path) -> Turn:
    home, other = folder / "home", folder / "other"
    shutil.rmtree(home / ".cache", ignore_errors=True)
    other.mkdir()
    exported = sidecar("export", "m", f"--sandbox=local:{home}", store=url, temporary=temporary, expect="committed")
    restored = sidecar("restore", "m", f"--sandbox=local:{other}", store=url, temporary=temporary, expect="complete")
    shutil.rmtree(other)
    shutil.rmtree(url.removeprefix("file:"))
    return Turn(exported, restored)


@contextmanager
def _environment(folder: Path, kind: str) -> Iterator[None]:
    """The keys of a kind, made once."""
    import pyrage

    before = dict(os.environ)
    if kind != "plain":
        key = folder / "identity"
        if not key.exists():
            key.touch(0o600)
            key.write_text(str(pyrage.x25519.Identity.generate()))
        os.environ["MEMORY_SIDECAR_IDENTITY_FILE"] = str(key)
    if kind == "encrypted and signed":
        os.environ["MEMORY_SIDECAR_SIGNING_KEY"] = "hmac-sha256:" + "c2VjcmV0" * 4
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
