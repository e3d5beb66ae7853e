"""What grows: bytes and seconds over many conversations, beside other tools; requests to the store over many memories."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks import homes, peers
from benchmarks.measure import sidecar
from benchmarks.plots import draw
from benchmarks.table import Section, seconds, size
from sidecar.engine.heads import fork
from sidecar.engine.queries import list_memories
from sidecar.store.repository import Repository
from sidecar.wiring import open_store


class CountingStore:
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name.startswith("_") or not callable(found):
            return found

        def ask(*words: Any, **options: Any) -> Any:
            self.asked[name] += 1
            return found(*words, **options)

        return ask


def count_requests(folder: Path, counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return how many requests a list of all memories takes, for stores with so many of them."""
    home = folder / "home"
    homes.small_files(home, 3, homes.Words(4, 1 << 20))
    (folder / "tmp").mkdir()
    url = f"file:{folder}/store"
    sidecar("export", "m0", f"--sandbox=local:{home}", store=url, temporary=folder / "tmp", expect="committed")
    found, made = [], 1
    for count in counts:
        for number in range(made, count):
            asyncio.run(fork(Repository(open_store(url)), "m0", f"m{number}"))
        made = max(made, count)
        store = CountingStore(open_store(url))
        asyncio.run(list_memories(Repository(store)))  # type: ignore[arg-type]
        found.append((count, sum(store.asked.values())))
    return found


def measure(folder: Path, scale: float, conversations: int, counts: Sequence[int], plots: Path) -> Section:
    """Measure both, and draw them into the folder ``plots``."""
    tools = peers.grow(folder / "growth", scale, conversations)
    (folder / "many").mkdir()
    requests = count_requests(folder / "many", counts)
    plots.mkdir(parents=True, exist_ok=True)
    rows = {tool.name: [*tool.costs[peers.FIRST], *tool.costs[peers.AFTER]] for tool in tools}
    stored = {name: list(enumerate(accumulate(cost.added / 1e6 for cost in row))) for name, row in rows.items()}
    took = {name: [(number, cost.seconds) for number, cost in enumerate(row[1:], 1)] for name, row in rows.items()}
    (plots / "bytes.svg").write_text(draw("MB in the store", "conversations", stored))
    (plots / "seconds.svg").write_text(draw("Seconds of an export", "conversations", took))
    (plots / "requests.svg").write_text(draw("Requests of `list`", "memories", {peers.OURS: requests}))
    section = Section(f"{conversations} conversations with a memory of {size(102e6 * scale)}, and many memories")
    for name, row in rows.items():
        later = sorted(cost.seconds for cost in row[1:])
        told = (
            f"{size(sum(cost.added for cost in row))} in the end, exports {seconds(later[0])} to {seconds(later[-1])}"
        )
        section.add(f"{conversations} conversations, {name}", *((told, "") if name == peers.OURS else ("", told)))
    for count, asked in requests:
        section.add(f"list of {count} memories", f"{asked} requests")
    return section
