"""What grows: bytes and seconds over many conversations, beside other tools; requests to the store over many memories."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from benchmarks import homes, peers
from benchmarks.measure import sidecar
from benchmarks.plots import draw
from benchmarks.table import Section, seconds, size
from sidecar.engine.heads import fork
from sidecar.engine.queries import list_memories
from sidecar.store.repository import Repository
from sidecar.wiring import open_store
from tests.parts.s3_servers import seaweedfs


def count_requests(folder: Path, counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return how many requests a list of all memories takes, for buckets with so many of them: by the server's count."""
    home = folder / "home"
    homes.small_files(home, 3, homes.Words(4, 1 << 20))
    (folder / "tmp").mkdir()
    found, made = [], 1
    before = dict(os.environ)
    with seaweedfs() as server:
        os.environ.update(server.environment())
        url = f"s3://{server.make_bucket('benchmark-growth')}/x?endpoint={server.endpoint}"
        try:
            sidecar("export", "m0", f"--sandbox=local:{home}", store=url, temporary=folder / "tmp", expect="committed")
            for count in counts:
                for number in range(made, count):
                    asyncio.run(fork(Repository(open_store(url)), "m0", f"m{number}"))
                made = max(made, count)
                asked = server.count_requests().total()
                asyncio.run(list_memories(Repository(open_store(url))))
                found.append((count, server.count_requests().total() - asked))
        finally:
            os.environ.clear()
            os.environ.update(before)
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
    (plots / "requests.svg").write_text(
        draw("Requests of a list of all memories, on S3", "memories", {peers.OURS: requests})
    )
    section = Section(f"{conversations} conversations with a memory of {size(102e6 * scale)}, and many memories")
    for name, row in rows.items():
        later = sorted(cost.seconds for cost in row[1:])
        told = (
            f"{size(sum(cost.added for cost in row))} in the end, exports {seconds(later[0])} to {seconds(later[-1])}"
        )
        section.add(f"{conversations} conversations, {name}", *((told, "") if name == peers.OURS else ("", told)))
    for count, asked in requests:
        section.add(f"list of all memories, {count} on S3", f"{asked} requests")
    return section
