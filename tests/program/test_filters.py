"""Settings leave without the keys that are secret or bound to a machine, however they are written."""

from __future__ import annotations

import pytest

from sidecar.layouts import load_built_in
from sidecar.program.privacy.settings_files import drop_keys, list_secret_keys

DROP = list(load_built_in()["claude-mem"].filters["settings.json"])


@pytest.mark.parametrize(
    "text",
    [
        '{"X_API_KEY": "hunter2", "x": 1}',
        '{"a": [{"b": {"x_token": "hunter2", "x": 1}}]}',
        '{"apiKey": "hunter2", "token": "hunter2", "authToken": "hunter2", "Password": "hunter2", "key": "hunter2"}',
        '{"\\u0041PI_KEY": {"deep": ["hunter2"]}}',
        '{"env": {"X_API_KEY": "hunter2"}, "env": {"a": 1}}',
        '{"a": "hunter2", "a": 1}',
        '\ufeff{"X_SECRET": "hunter2"}',
    ],
)
def test_secret_keys_stay_behind(text: str) -> None:
    left = drop_keys(text.encode(), DROP)
    assert left is not None and b"hunter2" not in left
    assert drop_keys(left, DROP) == left


@pytest.mark.parametrize(
    "text", ['{"a":  1, "MAX_TOKENS": 5, "SHOW_READ_TOKENS": true, "hotkey": "x", "n": NaN}', "{}", '{"x": [1.0]}\r\n']
)
def test_settings_without_secrets_stay_as_they_are(text: str) -> None:
    assert drop_keys(text.encode(), DROP) == text.encode()


@pytest.mark.parametrize("text", ["", "[]", '{"X_KEY": "hunter2"} // mine', "{" * 100_000, '"hunter2"'])
def test_what_is_no_object_cannot_be_cleared(text: str) -> None:
    assert drop_keys(text.encode(), DROP) is None


def test_what_was_secret_is_told_by_its_keys() -> None:
    text = (
        b'{"A_KEY": "hunter2", "B_TOKEN": "", "CLAUDE_MEM_WORKER_PORT": "1", "MODE": "x", "env": {"apiKey": "hunter2"}}'
    )
    assert list_secret_keys(text, DROP) == ["apiKey", "A_KEY"]
    assert list_secret_keys(b"no JSON", DROP) == []
