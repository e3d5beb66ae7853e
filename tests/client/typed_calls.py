"""What type checkers see of both kinds of clients. This is never run: ``make lint`` checks it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import assert_type

from sidecar.client import AsyncClient, AsyncConversation, Client, Conversation, Event, ExportReceipt, Memory, Operation


def call_blocking(client: Client) -> None:
    assert_type(client.export("m", sandbox="s", layouts=("notes",)), ExportReceipt)
    assert_type(client.memories(), list[Memory])
    assert_type(client.download("m", "latest", "m.tar.gz"), Path)
    assert_type(client.operation("id"), Operation)
    assert_type(client.events(), Iterator[Event])
    with client.conversation("m", sandbox="s") as memory:
        assert_type(memory, Conversation)
    client.export("m")  # type: ignore[call-arg]
    client.export("m", sandbox="s", colour="red")  # type: ignore[call-arg]
    client.restore("m", sandbox="s", mode="sideways")  # type: ignore[arg-type]


async def call_async(client: AsyncClient) -> None:
    assert_type(await client.export("m", sandbox="s", layouts=("notes",)), ExportReceipt)
    assert_type(await client.memories(), list[Memory])
    assert_type(await client.download("m", "latest", "m.tar.gz"), Path)
    assert_type(await client.operation("id"), Operation)
    assert_type(client.events(), AsyncIterator[Event])
    async with client.conversation("m", sandbox="s") as memory:
        assert_type(memory, AsyncConversation)
    client.memories()  # type: ignore[unused-coroutine]
    await client.export("m")  # type: ignore[call-arg]
