"""What a size limit leaves out, compared with the plainest way to say it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.engine.sandbox.dialogue import ANSWER_ALLOWANCE
from sidecar.format.protocol import ExportAnswer, encode
from sidecar.format.refusal import Refusal
from sidecar.program.limits.trim import Dropped, Limit, Row, describe_dropped, plan_trimming

TIERS = ("hot", "warm", "cold", "rebuildable")
FIRST = ("rebuildable", "cold", "warm")


def limit(key: str, most: int, trims: bool = True, layout: str = "", taken: int = 0) -> Limit:
    weigh: dict[str, Callable[[Row], int]] = {
        "bytes": lambda row: row.size,
        "file_bytes": lambda row: row.size,
        "files": lambda row: 1,
        "depth": lambda row: row.path.count("/"),
    }
    only = frozenset([layout]) if layout else None
    return Limit(f"limits.{key}", f"limit-{key}", most, trims, weigh[key], key in ("file_bytes", "depth"), only, taken)


class Model:
    """The same decision, made one step at a time by looking at everything again."""

    def __init__(self, rows: list[Row], limits: list[Limit], tiers: dict[str, str], sets: list[list[str]]) -> None:
        self.rows, self.limits, self.tiers = {row.path: row for row in rows}, limits, tiers
        parents = {row.path.rpartition("/")[0] for row in rows}
        able = [path for path, row in self.rows.items() if not (row.folder and path in parents)]
        grouped = {path for group in sets for path in group}
        self.units = [[path for path in group if path in able] for group in sets]
        self.units = [unit for unit in self.units if unit] + [[path] for path in able if path not in grouped]
        self.had = parents

    def total(self, one: Limit) -> int:
        return one.taken + sum(one.of(row) for row in self.rows.values())

    def tier(self, unit: list[str]) -> str:
        return min((self.tiers[path] for path in unit), key=TIERS.index)

    def left(self) -> set[str] | str:
        """The paths that stay, or the code of the limit that cannot be kept."""
        while (unit := self.next()) is not None:
            self.units.remove(unit)
            for path in unit:
                del self.rows[path]
            while emptied := [path for path in self.rows if self.emptied(path)]:
                del self.rows[emptied[0]]
        for one in self.limits:
            if one.each and any(one.of(row) > one.most for row in self.rows.values()):
                return one.code
            if not one.each and self.total(one) > one.most:
                return one.code
        return set(self.rows)

    def next(self) -> list[str] | None:
        able = [unit for unit in self.units if self.tier(unit) != "hot"]
        alone = [one for one in self.limits if one.each and one.trims]
        offending = [u for u in able if any(one.of(self.rows[p]) > one.most for p in u for one in alone)]
        together = [one for one in self.limits if not one.each and one.trims and self.total(one) > one.most]
        useful = [u for u in able if any(one.of(self.rows[p]) for p in u for one in together)]
        return min(
            offending or useful,
            key=lambda u: (FIRST.index(self.tier(u)), max(self.rows[p].mtime for p in u), min(u)),
            default=None,
        )

    def emptied(self, path: str) -> bool:
        inside = any(other.startswith(path + "/") for other in self.rows)
        return self.rows[path].folder and path in self.had and not inside and self.tiers[path] != "hot"


NAMES = st.sampled_from("abc")
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(lambda parts: "root/" + "/".join(parts))


@st.composite
def memories(draw: st.DrawFn) -> tuple[list[Row], dict[str, str], list[list[str]]]:
    files = draw(st.sets(PATHS, max_size=10))
    folders = {path.rsplit("/", up)[0] for path in files for up in range(1, 4) if path.count("/") > up}
    rows = []
    for path in sorted(files | folders):
        folder = path in folders
        empty = not folder and draw(st.integers(0, 5)) == 0
        size = 0 if folder or empty else draw(st.integers(0, 9))
        layout = draw(st.sampled_from(["x", "y"]))
        rows.append(Row(path, layout, size, draw(st.integers(0, 3)), folder or empty))
    tiers = {row.path: draw(st.sampled_from(TIERS)) for row in rows}
    names = [row.path for row in rows]
    group = sorted(draw(st.sets(st.sampled_from(names), max_size=3))) if names else []
    return rows, tiers, [group] if len(group) > 1 else []


LIMITS = st.lists(
    st.builds(
        limit,
        st.sampled_from(["bytes", "file_bytes", "files", "depth"]),
        st.integers(0, 20),
        st.booleans(),
        st.sampled_from(["", "x"]),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(memories(), LIMITS)
@example(([Row("root/a", "x", 5, 1)], {"root/a": "hot"}, []), [limit("bytes", 4)])
def test_a_plan_is_what_looking_again_after_each_step_would_do(
    memory: tuple[list[Row], dict[str, str], list[list[str]]], limits: list[Limit]
) -> None:
    rows, tiers, sets = memory
    expected = Model(rows, limits, tiers, sets).left()
    try:
        dropped = plan_trimming(rows, limits, tiers.__getitem__, sets)
    except Refusal as refusal:
        assert refusal.code == expected
        return
    gone = {row.path.rstrip("/") for row in dropped}
    assert {row.path for row in rows} - gone == expected
    assert plan_trimming(list(reversed(rows)), limits, tiers.__getitem__, sets) == dropped, (
        "the order of a walk is no matter"
    )
    assert not [path for path in gone if tiers[path] == "hot"]
    for group in sets:
        members = {path for path in group if not any(row.path.startswith(path + "/") for row in rows)}
        assert members <= gone or not members & gone


def _one(path: str, tier: str, size: int, mtime: int) -> tuple[Row, str]:
    return Row(f"root/{path}", "x", size, mtime), tier


MEMORY = [
    *(_one("db", "hot", 100, 9), _one("log-1", "cold", 10, 1), _one("log-2", "cold", 10, 2)),
    *(_one("todo", "warm", 10, 1), _one("vectors", "rebuildable", 10, 9), _one("none", "cold", 0, 0)),
]
TIER = {row.path: tier for row, tier in MEMORY}


@pytest.mark.parametrize(
    ("most", "gone"),
    [
        (140, []),
        (139, ["vectors"]),
        (130, ["vectors"]),
        (129, ["vectors", "log-1"]),
        (119, ["vectors", "log-1", "log-2"]),
        (100, ["vectors", "log-1", "log-2", "todo"]),
    ],
)
def test_rebuildable_goes_first_then_cold_then_warm_and_the_oldest_first(most: int, gone: list[str]) -> None:
    dropped = plan_trimming([row for row, _ in MEMORY], [limit("bytes", most)], TIER.__getitem__, [])
    assert [row.path for row in dropped] == [f"root/{name}" for name in gone]
    assert {row.reason for row in dropped} <= {"over limits.bytes"}


def test_what_is_hot_alone_is_refused_with_its_size() -> None:
    with pytest.raises(Refusal, match=r"has 100 bytes; limits.bytes allows 99. All that is left is hot") as refused:
        plan_trimming([row for row, _ in MEMORY], [limit("bytes", 99)], TIER.__getitem__, [])
    assert refused.value.code == "limit-bytes"


def test_a_set_goes_as_its_hottest_and_newest() -> None:
    rows = [row for row, _ in MEMORY]
    dropped = plan_trimming(rows, [limit("bytes", 129)], TIER.__getitem__, [["root/vectors", "root/todo"]])
    assert [row.path for row in dropped] == ["root/log-1", "root/log-2"]
    dropped = plan_trimming(rows, [limit("bytes", 119)], TIER.__getitem__, [["root/vectors", "root/todo"]])
    assert [row.path for row in dropped] == ["root/log-1", "root/log-2", "root/todo", "root/vectors"]
    assert dropped[-1] == Dropped("root/vectors", 10, "warm", "over limits.bytes, with root/todo")
    with pytest.raises(Refusal):
        plan_trimming(
            rows, [limit("bytes", 119)], TIER.__getitem__, [["root/vectors", "root/todo", "root/log-2", "root/db"]]
        )


def described(rows: list[Dropped]) -> ExportAnswer:
    answer = ExportAnswer("changed", "m", "s")
    describe_dropped(rows, answer)
    return answer


def test_a_report_has_an_end_and_counts_the_rest() -> None:
    rows = [Dropped(f"root/memory/papers/{number}.md", 1, "cold", "over limits.files") for number in range(25_000)]
    assert described(rows[:20_000]).dropped_more == 0, "twice what people have"
    told = described([*rows, Dropped("root/folder/", 0, "cold", "nothing is left in it")])
    assert (len(told.dropped), told.dropped_more) == (20_000, 5001)
    assert (told.dropped_files, told.dropped_bytes) == (25_000, 25_000)
    long = described([Dropped("\U0001f9e0" * 1000, 1, "cold", "over limits.files")] * 1000)
    assert len(long.dropped) < 400 and len(long.dropped) + long.dropped_more == 1000
    assert len(encode(long)) < ANSWER_ALLOWANCE // 2 + 1000
