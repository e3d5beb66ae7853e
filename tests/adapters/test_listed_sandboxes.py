"""What a provider lists: every sandbox once, the newest first, with its metadata, a page with each request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sidecar.errors import SandboxDenied
from sidecar.ports import ASLEEP, RUNNING, ListedSandbox
from sidecar.wiring import open_provider
from tests.parts.providers import Provider


@pytest.fixture(params=["e2b", "daytona"])
def provider(request: pytest.FixtureRequest, provider_of: Callable[[str], Provider]) -> Provider:
    return provider_of(request.param)


def _create(provider: Provider, **metadata: str) -> str:
    """Return the reference of a new sandbox with such metadata."""
    if provider.name == "e2b":
        return provider.create(metadata=metadata).ref
    return provider.create(labels=metadata).ref


async def _list(provider: Provider) -> list[ListedSandbox]:
    account = open_provider(provider.name)
    page = await account.list()
    found = list(page.sandboxes)
    while page.next:
        page = await account.list(page.next)
        found += page.sandboxes
    return found


async def test_every_sandbox_is_listed_once_the_newest_first(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = [_create(provider, memory=f"m{number}") for number in range(5)]
    monkeypatch.setattr(provider.server, "page", 2)
    provider.server.clear()
    found = await _list(provider)
    assert [one.ref for one in found] == refs[::-1]
    assert [one.metadata["memory"] for one in found] == [f"m{number}" for number in reversed(range(5))]
    assert {one.state for one in found} == {RUNNING} and all(one.created for one in found)
    assert [call.step for call in provider.server.calls] == ["list"] * 3
    assert (found[0].ends_at is not None) == (provider.name == "e2b")


async def test_what_sleeps_is_listed_as_asleep_and_what_is_gone_is_not_listed(provider: Provider) -> None:
    asleep, gone = _create(provider, memory="a"), _create(provider, memory="b")
    for ref, what in ((asleep, "pause"), (gone, "kill")):
        box = provider.server.find(ref.partition(":")[2])
        assert box is not None
        getattr(box, what)()
    (one,) = await _list(provider)
    assert (one.ref, one.state) == (asleep, ASLEEP)
    account = open_provider(provider.name)
    looked = await account.look(asleep)
    assert looked is not None and (looked.state, looked.metadata) == (ASLEEP, {"memory": "a"})
    assert await account.look(gone) is None and await account.look(f"{provider.name}:nobody") is None
    box = provider.server.find(asleep.partition(":")[2])
    assert box is not None and not box.running  # it was not woken


async def test_a_label_that_the_sdk_does_not_like_hides_no_other_sandbox(provider: Provider) -> None:
    refs = {_create(provider, **{"code-toolbox-language": "cobol"}), _create(provider, memory="x")}
    assert {one.ref for one in await _list(provider)} == refs


async def test_an_account_that_is_refused_is_said(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)
    monkeypatch.setenv("DAYTONA_API_KEY", "0" * 40)
    with pytest.raises(SandboxDenied):
        await open_provider(provider.name).list()
