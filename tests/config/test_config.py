"""Bad settings are named, with the nearest right one, before anything is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.cli.main import main
from sidecar.config.settings import load_config
from sidecar.errors import BadConfig
from sidecar.policy.retention import KeepLast, KeepPeriods


def config(tmp_path: Path, text: str):  # type: ignore[no-untyped-def]
    file = tmp_path / "sidecar.toml"
    file.write_text(text)
    return load_config(str(file))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stor = 'file:/x'", "Did you mean 'store'?"),
        ("[limits]\nbyte = 1", "Did you mean 'bytes'?"),
        ("[limits]\nbytes = -1", "must not be negative"),
        ("[limits]\nbytes = 'many'", "not valid"),
        ("[guards]\nshrink = 1", "unknown key"),
        ("store = 3", "must be a text"),
        ("not toml", "is not TOML"),
        ("[layouts.x]\nkeeps = ['a']", "Did you mean 'keep'?"),
        ("[layouts.x]\nkeep = ['a']\n[[layouts.x.roots]]\nname = 'X/..'\npaths = ['~/x']", "lower-case"),
        ("[layouts.x]\nkeep = ['a']\nroots = []", "at least one root"),
        ("[layouts.x]\nkeep = ['a']\n[[layouts.x.roots]]\nname = 'x'", "either project = true or paths"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadConfig) as refused:
        config(tmp_path, text)
    assert words in f"{refused.value.message} {refused.value.hint}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keep_lats = 3", "[retention] has an unknown key 'keep_lats'. Did you mean 'keep_last'?"),
        ("keep_last = -1", "[retention] keep_last must not be negative"),
        ("keep_last = 'three'", "[retention] keep_last is not valid"),
        ("keep_last = true", "[retention] keep_last is not valid"),
        ("keep_last = 0", "keep_last = 0 and nothing else keeps no snapshot but the head. Write keep_last = 1 or more"),
        ("daily = 0\nyearly = 0", "daily = 0 and nothing else"),
        (
            "keep_within = '30 days'",
            "keep_within = '30 days' is no duration. Write a number and one of s, m, h, d, w, y",
        ),
        ("keep_within = ''", "keep_within = '' is no duration"),
        ("keep_within = '99999y'", "thousand years"),
        ("grace = 'soon'", "grace = 'soon' is no duration"),
        ("grace = '10m'", 'shorter than what an export may take. Write grace = "3600s" or more'),
        ("keep_within = '0d'", "keep_within = '0d' is no time at all. Write more"),
        ("keep_last = 3\n[retention.memories.a]\nkeep_within = '0s'", "\"a\"] keep_within = '0s' is no time at all"),
        ("every = '0.5s'", "every must be at least a second"),
        ("at = '30 25 * * *'", "[retention] at = '30 25 * * *' is no cron expression: '25' is no hour"),
        ("keep_calls = 'x'", "keep_calls = 'x' is no duration"),
        ("memory_bytes = 10\nstore_bytes = 9", "memory_bytes = 10 is more than store_bytes = 9"),
        ("keep_labelled = ['']", "empty pattern"),
        ("keep_labelled = 'x'", "[retention] keep_labelled is not valid"),
        ("memories = 3", "[retention] memories is not valid"),
        ("[retention.memories.'a/*']\nkeeplast = 1", """[retention.memories."a/*"] has an unknown key 'keeplast'"""),
        ("[retention.memories.'a/*']\nkeep_last = -1", '[retention.memories."a/*"] keep_last must not be negative'),
        ("[retention.memories.'a/*']\nkeep_last = 0", '[retention.memories."a/*"] keep_last = 0 and nothing else'),
        ("[retention.memories.'a/*']\nkeep_within = '1q'", """[retention.memories."a/*"] keep_within = '1q'"""),
        ("[retention.memories.'a/*']\ngrace = '1d'", "unknown key 'grace'"),
        ("store_bytes = 5\n[retention.memories.'a']\nmemory_bytes = 6", '[retention.memories."a"] memory_bytes = 6'),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused_at_start(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadConfig) as refused:
        config(tmp_path, f"[retention]\n{text}\n")
    assert words in f"{refused.value.message} {refused.value.hint}"


def test_the_first_pattern_that_matches_a_memory_says_what_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMORY_SIDECAR_RETENTION_KEEP_LAST", "5")
    monkeypatch.setenv("MEMORY_SIDECAR_RETENTION_KEEP_LABELLED", "release-*, final")
    text = "[retention]\ndaily = 7\n[retention.memories.'acme/*']\nkeep_last = 50\n[retention.memories.'*/agent']\n"
    retention = config(tmp_path, text).retention
    assert retention.build_policy_for("other").rules == (KeepLast(5), KeepPeriods("daily", 7))
    assert retention.build_policy_for("other").labelled.patterns == ("release-*", "final")
    assert retention.build_policy_for("acme/agent").rules == (KeepLast(50),)
    assert retention.build_policy_for("some/agent").rules == ()
    assert config(tmp_path, "").retention.build_policy_for("any").rules == (KeepLast(5),)
    monkeypatch.setenv("MEMORY_SIDECAR_RETENTION_KEEP_LAST", "0")
    with pytest.raises(BadConfig, match="MEMORY_SIDECAR_RETENTION_KEEP_LAST = 0"):
        config(tmp_path, "")


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="cannot be read"):
        load_config(str(tmp_path / "none.toml"))


def test_the_store_comes_from_the_command_line_then_the_environment_then_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEMORY_SIDECAR_STORE", raising=False)
    file = tmp_path / "c.toml"
    file.write_text("store = 'file:/from-file'\n[limits]\nfiles = 7")
    assert load_config(str(file)).store == "file:/from-file"
    assert load_config(str(file)).limits.files == 7
    monkeypatch.setenv("MEMORY_SIDECAR_STORE", "file:/from-environment")
    assert load_config(str(file)).store == "file:/from-environment"
    assert load_config(str(file), store="file:/given").store == "file:/given"
    monkeypatch.delenv("MEMORY_SIDECAR_STORE")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert load_config(None).store == "file:/data/memory-sidecar"


def test_a_store_that_is_none_is_refused_with_where_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MEMORY_SIDECAR_STORE", raising=False)
    file = tmp_path / "c.toml"
    file.write_text("direct = false\nstore = 'ftp://x'\n")
    assert main(["list", f"--config={file}"]) == 2
    assert f"{file}:2: There is no 'ftp:' store." in capsys.readouterr().err
    assert main(["config", "check", f"--config={file}"]) == 2
    assert f"{file}:2: There is no 'ftp:' store." in capsys.readouterr().out
    monkeypatch.setenv("MEMORY_SIDECAR_STORE", "ftp://y")
    assert main(["config", "check", f"--config={file}"]) == 2
    assert "MEMORY_SIDECAR_STORE: There is no 'ftp:' store." in capsys.readouterr().out
    assert main(["config", "check", "--store=ftp://z"]) == 2


def test_the_page_of_options_is_what_the_code_says() -> None:
    from sidecar.cli.config import render_options_page
    from tests.parts.homes import PROJECT

    assert (PROJECT / "docs/options.md").read_text().strip() == render_options_page().strip()


def test_the_environment_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[service]\ngrace = 3\nlease = 9\n")
    monkeypatch.setenv("MEMORY_SIDECAR_SERVICE_GRACE", "7.5")
    config = load_config(str(file))
    assert (config.service.grace, config.service.lease) == (7.5, 9)
    monkeypatch.setenv("MEMORY_SIDECAR_SERVICE_GRACE", "soon")
    with pytest.raises(BadConfig, match="MEMORY_SIDECAR_SERVICE_GRACE must be a number"):
        load_config(str(file))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('[[webhooks]]\nurl = "ftp://x"\n', "http"),
        ('[[webhooks]]\nurl = "http://x"\nevent = ["*"]\n', "event"),
        ('[webhooks]\nurl = "http://x"\n', r"\[\[webhooks\]\]"),
        ('[[webhooks]]\nurl = "http://x"\nsecret_env = "NOT_SET_ANYWHERE"\n', "NOT_SET_ANYWHERE"),
    ],
)
def test_a_webhook_that_cannot_work_is_refused_at_start(tmp_path: Path, text: str, wrong: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(BadConfig, match=wrong):
        load_config(str(file))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('provider = "e2b"', "memories"),
        ('memories = ["a"]', "provider"),
        ('provider = "local"\nmemories = ["a"]', "lists no sandboxes"),
        ('provider = "e2b"\nmemories = []', "memories"),
        ('provider = "e2b"\nmemories = ["acme/../x"]', "matches no memory"),
        ('provider = "e2b"\nmemories = ["acme/[*"]', r"'acme/\[\*' is no pattern: a pattern has no \[classes\]"),
        ('provider = "e2b"\nmemories = ["acme/{a,b"]', "braces are not paired"),
        ('provider = "e2b"\nmemories = ["acme/a]"]', "is no pattern"),
        ('provider = "e2b"\nmemories = ["a"]\nmemory_from = "env.MEMORY"', "memory_from"),
        ('provider = "e2b"\nmemories = ["a"]\nmemory_from = "metadata."', "memory_from"),
        ('provider = "e2b"\nmemories = ["a"]\nsecond = "both"', "second"),
        ('provider = "e2b"\nmemories = ["a"]\nlist_every = 0.1', "list_every"),
        ('provider = "e2b"\nmemories = ["a"]\nlist_every = 0', "finds nothing"),
        ('provider = "e2b"\nmemories = ["a"]\ncheckpoint_every = 0', "checkpoint_every"),
        ('provider = "e2b"\nmemories = ["a"]\nsecret_env = "NOT_SET_ANYWHERE"', "NOT_SET_ANYWHERE is not set"),
        ('provider = "e2b"\nmemories = ["a"]\nsecret_env = "SHORT"', "SHORT is too short"),
        ('provider = "e2b"\nmemories = ["a"]\nmemory = "a"', "unknown key 'memory'"),
    ],
)
def test_a_watch_that_cannot_work_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, wrong: str
) -> None:
    monkeypatch.setenv("SHORT", "x" * 15)
    file = tmp_path / "c.toml"
    file.write_text(f"[[watch]]\n{text}\n")
    with pytest.raises(BadConfig, match=wrong):
        load_config(str(file))


def test_a_watch_has_defaults_that_work(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[[watch]]\nprovider = "daytona"\nmemories = ["acme/*"]\nmemory_from = "labels.agent.memory"\n')
    (table,) = load_config(str(file)).watch
    assert (table.key, table.checkpoint_every, table.second) == ("agent.memory", 30.0, "reader")
