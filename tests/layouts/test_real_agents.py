"""The real programs: a conversation begun at one provider is gone on with at the next, by the program itself."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from sidecar.engine import ExportRequest, RestoreRequest, export, restore
from tests.parts.agents import PACKAGES, Agent, Model
from tests.parts.memories import Box, Name, engine_on, provider_named
from tests.parts.samples import PROJECT, leaked

pytestmark = pytest.mark.slow
MEMORY = "m"


@pytest.fixture
def model() -> Iterator[Model]:
    with Model().serving() as serving:
        yield serving


@pytest.fixture
def boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Box]]:
    """A sandbox at each provider."""
    names: tuple[Name, ...] = ("e2b", "daytona", "local")
    with ExitStack() as providers:
        found = []
        for name in names:
            provider = providers.enter_context(provider_named(name, tmp_path / "provider"))
            for variable, value in (provider.emulator.environment() if provider.emulator else {}).items():
                monkeypatch.setenv(variable, value)
            found.append(provider.box())
        yield found


def sessions(layout: str, home: Path) -> set[str]:
    """The sessions there are, by their program's own names for them."""
    if layout == "claude-code":
        return {transcript.stem for transcript in (home / ".claude/projects").glob("*/*.jsonl")}
    if layout == "codex":
        rollouts = (home / ".codex/sessions").rglob("*.jsonl")
        return {str(json.loads(rollout.read_text().splitlines()[0])["payload"]["id"]) for rollout in rollouts}
    with closing(sqlite3.connect(home / ".local/share/opencode/opencode.db")) as connection:
        return {str(session) for (session,) in connection.execute("SELECT id FROM session")}


@pytest.mark.parametrize("layout", list(PACKAGES))
async def test_a_conversation_goes_on_at_the_next_provider(
    layout: str, boxes: list[Box], model: Model, tmp_path: Path
) -> None:
    engine, agent = engine_on(f"file:{tmp_path / 'store'}"), Agent(layout, model)
    projects = (f"~/{PROJECT}",)
    told: dict[str, str] = {}
    """What was said, by the session it was said in."""
    for number, box in enumerate(boxes):
        home, project = box.home, box.home / PROJECT
        if number:
            receipt = await restore(engine, box.open(), RestoreRequest(memory=MEMORY, projects=projects))
            assert (receipt.outcome, receipt.warnings) == ("complete", [])
            assert leaked(home) == []
            assert sessions(layout, home) == set(told)
        model.asked.clear()
        word = f"vermilion-{number}"
        goes_on = layout != "opencode"
        agent.talk(home, project, word, session=next(iter(told), "") if goes_on else "")
        if goes_on:
            told = {session: f"{earlier} {word}" for session, earlier in told.items()}
            assert all(
                any(each in question for question in model.asked) for text in told.values() for each in text.split()
            )
        else:
            assert all(text in agent.shown(home, project, session) for session, text in told.items())
        told = {session: told.get(session, word) for session in sessions(layout, home)}
        assert len(told) == (1 if goes_on else number + 1)
        sent = await export(engine, box.open(), ExportRequest(memory=MEMORY, layouts=(layout,), projects=projects))
        assert (sent.outcome, sent.kind) == ("committed", "delta" if number else "full")
