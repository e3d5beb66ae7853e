"""Three services on one store look after many sandboxes: all are saved in time, by one each, also when one is killed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.parts.homes import empty_home, write
from tests.parts.services import Service, path, serving, until

pytestmark = pytest.mark.slow

LEASE = 10.0


@pytest.fixture
def services(tmp_path: Path) -> Iterator[list[Service]]:
    with ExitStack() as held:
        yield [
            held.enter_context(serving(tmp_path / "store", tmp_path / f"log{number}", lease=LEASE, grace=60))
            for number in range(3)
        ]


def rows(service: Service) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        answer = service.http.get("/v1/attachments", params={"after": after} if after else {}).json()
        found += answer["attachments"]
        if not (after := answer["next"] or ""):
            return found


def owners(service: Service) -> Counter[str]:
    return Counter(row["owner"] for row in rows(service) if row["state"] == "open")


@pytest.mark.parametrize(("count", "every"), [(60, 20)])
def test_all_are_saved_in_time_by_one_service_each(
    services: list[Service], tmp_path: Path, count: int, every: int
) -> None:
    first = services[0]
    homes = [empty_home(tmp_path / "homes" / str(number)) for number in range(count)]
    for number, home in enumerate(homes):
        write(home / "MEMORY.md", b"# It begins\n")
        body = {"sandbox": f"local:{home}", "checkpoint_every": every}
        assert first.http.put(path(f"m{number}", "attachment"), json=body).is_success

    def even(among: int) -> bool:
        shares = owners(first)
        share = count / among
        return len(shares) == among and all(abs(have - share) <= max(1.0, share * 0.2) for have in shares.values())

    def all_saved_since(moment: float) -> bool:
        begun = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment))
        return all(row["saved"] and row["saved"] >= begun for row in rows(first))

    until(lambda: all_saved_since(0), every + 60 + count)
    until(lambda: even(3), 10 * LEASE + count)
    for home in homes:
        write(home / "MEMORY.md", b"# It goes on\n")
    changed = time.time()
    until(lambda: all_saved_since(changed), every + 60)
    services[2].kill()
    killed = time.monotonic()
    until(lambda: sum(owners(first).values()) == count and len(owners(first)) == 2, 2 * LEASE + 10)
    print(f"taken over after {time.monotonic() - killed:.1f} s")
    for home in homes:
        write(home / "MEMORY.md", b"# It ends\n")
    changed = time.time()
    until(lambda: all_saved_since(changed), every + 60)
    until(lambda: even(2), 10 * LEASE)
    for number in range(count):
        found = first.http.get(path(f"m{number}", "snapshots")).json()["snapshots"]
        assert {row["standing"] for row in found} <= {"head", "earlier head"}, found
        assert len(found) <= 4, found
