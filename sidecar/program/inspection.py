"""Inspect a sandbox without changing anything: what an export would contain, how much, and what it would leave out and
why."""

from __future__ import annotations

import os
import stat
from typing import Optional

from sidecar.format.protocol import (
    AllowedPaths,
    Amount,
    LookAnswer,
    LookQuestion,
    Rules,
    SeenDatabase,
    SeenRoot,
    SeenSet,
)
from sidecar.format.refusal import Refusal
from sidecar.program.capture.discovery import (
    FoundRoots,
    describe_absent,
    find_roots,
    match_keyed_folders,
    name_projects,
)
from sidecar.program.capture.roots import Root
from sidecar.program.capture.versions import find_version
from sidecar.program.capture.walk import Skipped, has_header, walk
from sidecar.program.limits.tiers import TIERS, TierRules
from sidecar.program.places import contain
from sidecar.program.scratch import locate_own_folder
from sidecar.program.sqlite.backup import JOURNAL_TAIL, WAL_TAIL, measure
from sidecar.program.worker.holders import find_holders

MOST_SHOWN = 50


def look(question: LookQuestion, rules: Rules, home: str, allowed: Optional[AllowedPaths]) -> LookAnswer:
    """Return the roots found in this sandbox, each with its sizes, databases, workers and skipped paths."""
    layouts, elsewhere = rules.select(question.layouts), rules.list_others(question.layouts)
    contained = contain(allowed, locate_own_folder(home))
    found = find_roots(layouts, question.projects, home, contained, elsewhere=elsewhere)
    return LookAnswer(
        "looked",
        question.memory,
        question.snapshot,
        warnings=describe_absent(question.projects, home),
        notices=found.warnings,
        projects=name_projects(question.projects, home),
        found=[_describe_root(root, found, home) for root in found.roots],
    )


def _describe_root(root: Root, found: FoundRoots, home: str) -> SeenRoot:
    """Describe one root; ``problem`` says why it could not be read to its end."""
    tiers, skipped = TierRules(root.layout, root.folder, root.owned), Skipped(found.roots)
    sizes = {tier: Amount() for tier in TIERS}
    paths, databases, problem = [], [], ""
    try:
        for one in walk(root, skipped):
            paths.append(one.relative)
            if stat.S_ISREG(one.status.st_mode):
                row = sizes[tiers.of(one.relative)]
                row.files += 1
                row.bytes += one.status.st_size
                if root.rules.database(one.relative) or has_header(one.place):
                    databases.append(_describe_database(one.path, one.place))
    except Refusal as refusal:
        problem = refusal.message
    return SeenRoot(
        name=root.name,
        layout=root.layout["name"],
        folder=root.folder,
        version=find_version(root.layout, home),
        tiers=sizes,
        sets=[SeenSet(each.tier, len(each.paths)) for each in tiers.sets(paths)][:MOST_SHOWN],
        databases=databases,
        workers=[repr(holder) for holder in find_holders([row.place for row in databases])],
        keyed=match_keyed_folders([root], found.projects, home, [root.path(path) for path in paths]),
        skipped=skipped.rows[:MOST_SHOWN],
        skipped_more=max(0, len(skipped.rows) - MOST_SHOWN) + skipped.more,
        reasons=skipped.reasons,
        problem=problem,
    )


def _describe_database(path: str, place: str) -> SeenDatabase:
    """Return a database's size, how many of its bytes are free pages, and how many are in its log. No lock is taken."""
    whole, free = measure(place)
    row = SeenDatabase(path, place, whole, free_bytes=min(free, whole))
    for tail in (WAL_TAIL, JOURNAL_TAIL):
        if os.path.exists(place + tail):
            row.log_bytes += os.path.getsize(place + tail)
    return row
