"""Remove old lines of an audit from the store. That is told by lines itself, before anything is removed."""

from __future__ import annotations

import time

from sidecar.audit.lines import Kind, decode_line, encode_latest
from sidecar.audit.reader import list_chains
from sidecar.audit.trail import Trail
from sidecar.audit.verification import Cut
from sidecar.errors import ObjectRefused
from sidecar.ids import AUDIT_LATEST, AuditKeys
from sidecar.ports import Store


async def cut_audit(store: Store, trail: Trail, keep_seconds: float) -> int:
    """Remove objects that were written more than ``keep_seconds`` ago, from the beginning of each chain; with the last
    one its tail. Return how many objects were removed. Raise a ``SidecarError``."""
    chains, _ = await list_chains(store)
    oldest = time.time() - keep_seconds
    cuts: dict[str, Cut] = {}
    going: list[str] = []
    for chain, objects in chains.items():
        old = []
        for info in objects.lines:
            if info.modified >= oldest:
                break
            old.append(info.key)
        if old:
            _, _, through, digest = max(map(AuditKeys.parse_lines, old), key=lambda parsed: parsed[2])
            cuts[chain] = Cut(through, digest)
        going += old
        if len(old) == len(objects.lines) and objects.written < oldest:
            going.append(AuditKeys(chain).tail)
    if not going:
        return 0
    # What was cut off earlier, as told by lines that go now, has to be told again as long as there is more of the chain.
    for key in going:
        for chain, cut in (await _read_cuts(store, key)).items():
            if chain in chains and (chain not in cuts or cuts[chain].through < cut.through):
                cuts[chain] = cut
    trail.add_cuts(cuts)
    await trail.write()
    stored = await store.get(AUDIT_LATEST)
    if stored is not None and any(stored.data == encode_latest(chain) for chain in cuts):
        # A chain that is begun much later must not name one that nobody remembers.
        await store.put(AUDIT_LATEST, encode_latest(trail.chain))
    await store.delete(going)
    return len(going)


async def _read_cuts(store: Store, key: str) -> dict[str, Cut]:
    """Return what the lines of an object say was cut off other chains. What was altered in it says nothing."""
    try:
        stored = await store.get(key)
    except ObjectRefused:
        return {}
    found = {}
    for row in stored.data.splitlines() if stored is not None else ():
        try:
            line = decode_line(row)
        except ValueError:
            continue
        if line.kind == Kind.CUT:
            found[line.cut] = Cut(line.through, line.digest)
    return found
