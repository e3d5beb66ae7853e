"""Real coding agents from npm, and a model on loopback that understands everything and remembers what it was told.

Each is installed once, alone, and run without a terminal in a home of its own; a conversation is one prompt.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import pytest

_CACHE = Path(__file__).resolve().parents[2] / ".cache" / "agents"
_INSTALL_WITHIN, _TALK_WITHIN = 600.0, 120.0
PACKAGES = {
    "claude-code": ("@anthropic-ai/claude-code@2.1.197", "claude"),
    "codex": ("@openai/codex@0.166.0", "codex"),
    "opencode": ("opencode-ai@1.18.33", "opencode"),
}


class Model:
    """Answers every question with one word, in the manner of three vendors, and keeps the questions."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        model = self

        class Desk(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._say("application/json", json.dumps({"object": "list", "data": [{"id": "fake"}]}))

            do_HEAD = do_GET  # noqa: N815 (the library's name)

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode("utf-8", "replace")
                model.asked.append(text)
                self._say(*_answer(self.path, text))

            def _say(self, kind: str, text: str) -> None:
                body = text.encode()
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Desk)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator[Model]:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()


def _answer(path: str, text: str) -> tuple[str, str]:
    word, usage = "understood", {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    if "/messages" in path:
        message: dict[str, Any] = {"id": "m", "type": "message", "role": "assistant", "model": "fake", "usage": usage}
        message |= {"content": [], "stop_reason": None, "stop_sequence": None}
        if '"stream":true' not in text.replace(" ", ""):
            message |= {"content": [{"type": "text", "text": word}], "stop_reason": "end_turn", "input_tokens": 1}
            return "application/json", json.dumps(message)
        return "text/event-stream", _events(
            {"type": "message_start", "message": message},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": usage},
            {"type": "message_stop"},
        )
    if "/responses" in path:
        item = {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": word}]}
        return "text/event-stream", _events(
            {"type": "response.created", "response": {"id": "r"}},
            {"type": "response.output_item.done", "item": item},
            {"type": "response.completed", "response": {"id": "r", "usage": usage}},
        )
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "fake"}
    first = {**chunk, "choices": [{"index": 0, "delta": {"role": "assistant", "content": word}, "finish_reason": None}]}
    last = {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    return "text/event-stream", f"data: {json.dumps(first)}\n\ndata: {json.dumps(last)}\n\ndata: [DONE]\n\n"


def _events(*events: dict[str, Any]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


class Agent:
    """One agent, at whatever home it is started in."""

    def __init__(self, name: str, model: Model) -> None:
        self.name = name
        self._model = model
        self._program = _installed(name)

    def talk(self, home: Path, project: Path, prompt: str, *, session: str = "") -> None:
        """Have a conversation, or go on with an earlier one."""
        assert "understood" in self._run(home, project, *self._words(home, prompt, session))

    def _run(self, home: Path, project: Path, *words: str) -> str:
        project.mkdir(parents=True, exist_ok=True)
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": self._model.url,
            "ANTHROPIC_API_KEY": "sk-hunter2",
            "FAKE_KEY": "sk-hunter2",
            "DISABLE_TELEMETRY": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }
        ran = subprocess.run(
            [self._program, *words],
            cwd=project,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TALK_WITHIN,
        )
        assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
        return ran.stdout

    def shown(self, home: Path, project: Path, session: str) -> str:
        """What opencode itself has to say of a session. It goes on with one only in the very folder it began in."""
        return self._run(home, project, "export", session)

    def _words(self, home: Path, prompt: str, session: str) -> list[str]:
        if self.name == "claude-code":
            return ["-p", *(["--continue"] if session else []), prompt]
        if self.name == "codex":
            settings = home / ".codex/config.toml"
            settings.parent.mkdir(exist_ok=True)
            settings.write_text(
                'model = "fake"\nmodel_provider = "fake"\n[model_providers.fake]\nname = "fake"\n'
                f'base_url = "{self._model.url}/v1"\nenv_key = "FAKE_KEY"\nwire_api = "responses"\n'
            )
            return ["exec", "--skip-git-repo-check", *(["resume", session] if session else []), prompt]
        options = {"baseURL": f"{self._model.url}/v1", "apiKey": "hunter2"}
        fake = {"npm": "@ai-sdk/openai-compatible", "name": "fake", "options": options, "models": {"fake": {}}}
        settings = home / ".config/opencode/opencode.json"
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(json.dumps({"provider": {"fake": fake}, "model": "fake/fake", "autoupdate": False}))
        return ["run", prompt]


def _installed(name: str) -> str:
    """The program, installed on first use. Skip the test where it cannot be; fail it where the variable CI is set."""
    package, program = PACKAGES[name]
    folder = _CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / f"done-{package.rpartition('@')[2]}"
        if not done.exists():
            npm = shutil.which("npm") or _unavailable(name, "npm is not installed")
            command = [npm, "install", "--no-save", "--no-audit", "--no-fund", "--loglevel=error", f"--prefix={folder}"]
            try:
                subprocess.run([*command, package], check=True, capture_output=True, timeout=_INSTALL_WITHIN)
            except subprocess.SubprocessError as problem:
                _unavailable(name, f"npm could not install {package}: {problem}")
            done.touch()
    return str(folder / "node_modules/.bin" / program)


def _unavailable(name: str, reason: str) -> NoReturn:
    message = f"no {name} to test with: {reason}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
