"""A policy that could never work is refused when it is read, with the line to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.config.lines import TomlLines
from sidecar.config.settings import load_config
from sidecar.errors import BadConfig
from sidecar.host.text import parse_size
from sidecar.policy.limits import Limits

WRONG = {
    "negative": ("[limits]\nbytes = 1000\nfile_bytes = -1\n", 3, "must not be negative"),
    "zero": ("[limits]\n\nfiles = 0\n", 3, "nothing could ever be exported"),
    "part-above-whole": ("[limits]\nbytes = '1 MB'\nfile_bytes = '2 MB'\n", 3, "more than [limits] bytes"),
    "pack-above-memory": ("[limits]\npacked_bytes = 9\nmemory_bytes = 8\n", 2, "more than [limits] memory_bytes"),
    "memory-above-store": ("[limits]\nmemory_bytes = 9\nstore_bytes = 8\n", 2, "more than [limits] store_bytes"),
    "unknown-key": ("# first\n[limits]\n# second\nbites = 1\n", 4, "Did you mean 'bytes'?"),
    "unknown-mode": ("[limits]\nover = 'trimm'\n", 2, "Did you mean 'trim'?"),
    "unknown-mode-of-one": ("[limits]\nfile_bytes_over = 'drop'\n", 2, '"reject" or "trim"'),
    "no-size": ("[limits]\nbytes = 'many'\n", 2, '"500 MB"'),
    "no-share": ("[limits]\nwarn_at = 80\n", 2, "at most 1"),
    "wrong-type": ("[limits]\nfiles = 1.5\n", 2, "not valid"),
    "unknown-layout": ("[limits.layouts.claude-men]\nbytes = 1\n", 1, "Did you mean 'claude-mem'?"),
    "key-not-of-a-layout": ("[limits.layouts.claude-mem]\nbytes = 1\npacked_bytes = 1\n", 3, "of a whole memory"),
    "layout-above-all": (
        *("[limits]\nbytes = 10\n[limits.layouts.three-tier]\nfiles = 2\nbytes = 11\n", 5, "more than [limits] bytes"),
    ),
    "zero-in-a-layout": ("[limits.layouts.three-tier]\ndepth = 0\n", 2, "nothing could ever"),
    "negative-in-a-memory": ("[limits]\nbytes=5\n[limits.memories.\"acme/*\"]\nfiles = 3\nbytes = -5\n", 5, "negative"),
    "unknown-in-a-memory": ("[limits.memories.'acme/*']\nfile = 3\n", 2, "Did you mean 'files'?"),
    "contradiction-in-a-memory": ("[limits.memories.a]\nbytes = 5\nfile_bytes = 6\n", 3, "more than"),
    "never-reached": ("[limits.memories.'acme/**']\nfiles=9\n[limits.memories.'acme/a']\nfiles=1\n", 3, "never reached"),
    "no-table": ("[limits]\nlayouts = 3\n", 2, "not valid"),
    "unknown-guard": ("[guards]\nshrink = 1\n", 2, "unknown key"),
    "no-share-of-the-head": ("[guards]\nshrink_to = 2\n", 2, "a share"),
    "unknown-reason": ("[guards]\nallow = ['shrank']\n", 2, "Did you mean 'shrunk'?"),
    "guard-of-unknown-layout": ("[guards.layouts.three-teir]\nshrink_to = 0.1\n", 1, "Did you mean 'three-tier'?"),
    "guard-of-a-layout": ("[guards.layouts.three-tier]\nrequired = 'MEMORY.md'\n", 2, "a list of paths"),
    "dotted": ("limits.files = 3\nlimits.depth = 0\n", 2, "nothing could ever"),
    "inline": ("store = 'file:/x'\nlimits = { files = 0 }\n", 2, "nothing could ever"),
    "layout": ("[layouts.x]\nkeep = ['a']\nkeeps = ['a']\n", 3, "Did you mean 'keep'?"),
    "timing": ("[timing]\ncommand = 5\nturn_wait = 'long'\n", 3, "not valid"),
    "no-end": ("[timing]\nturn_wait = 5\ncommand = inf\n", 3, "[timing] command must be a finite number"),
    "no-number": ("[limits]\nwarn_at = nan\n", 2, "must be a finite number"),
    "no-time": ("[timing]\ncommand = 0\n", 2, "[timing] command must be at least 1"),
    "no-time-for-a-link": ("[timing]\ndirect = 0\n", 2, "at least 1"),
    "nothing-at-once": ("[service]\nconcurrency = 0\n", 2, "[service] concurrency must be at least 1"),
    "no-lease": ("[service]\nlease = 0.0\n", 2, "at least 1"),
    "unknown-log": ("[service]\nlog = 'yaml'\n", 2, '"auto" or "json" or "console"'),
    "no-address": ("[service]\nqueue = 0\nbind = 'nonsense'\n", 3, "no address to listen on"),
    "files-above-all": ("[limits]\nfiles = 9\n[limits.layouts.pai]\nfiles = 10\n", 4, "more than [limits] files"),
    "second-webhook": ("[[webhooks]]\nurl = 'http://x'\n[[webhooks]]\nurl = 'ftp://x'\n", 4, "http://"),
    "odd-line-break": ("# one\u2028line\x85\n[limits]\nfiles = 0\n", 3, "nothing could ever"),
    "toml": ("store = 'x'\nnot toml\n", 2, "is not TOML"),
    "top": ("store = 'file:/x'\nlimit = 3\n", 2, "Did you mean 'limits'?"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setting_is_named_with_its_line(case: str, tmp_path: Path) -> None:
    text, line, words = WRONG[case]
    file = tmp_path / "config.toml"
    file.write_text(text, "utf-8")
    with pytest.raises(BadConfig) as refused:
        load_config(str(file))
    assert refused.value.message.startswith(f"{file}:{line}: "), refused.value.message
    assert words in f"{refused.value.message} {refused.value.hint}"


def test_what_can_be_said_of_all_of_some_and_of_one_layout(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        """
        [limits]
        bytes = "2 GiB"
        files = 1000
        file_bytes_over = "trim"
        [limits.layouts.claude-mem]
        file_bytes = "1 GB"
        over = "trim"
        [limits.memories."acme/agent-7"]
        bytes = "5 GiB"
        [limits.memories."acme/*"]
        files = 7
        [guards.memories."acme/**"]
        allow = ["empty"]
        [guards.layouts.three-tier]
        required = ["MEMORY.md"]
        """
    )
    config = load_config(str(file))
    limits = config.limits
    assert (limits.bytes, limits.list_trimming()) == (2 << 30, ["file_bytes"])
    assert (limits.of("acme/agent-7").bytes, limits.of("acme/agent-7").files) == (5 << 30, 1000)
    assert (limits.of("acme/other").bytes, limits.of("acme/other").files) == (2 << 30, 7)
    assert limits.of("acme/team/a").files == limits.of("conductor").files == 1000
    part = limits.of("acme/other").narrow_to_layout("claude-mem")
    assert (part.file_bytes, part.files, part.trims("bytes")) == (10**9, 7, True)
    assert config.guards.of("acme/team/a").allow == ["empty"]
    assert config.guards.of("conductor").allow == []
    assert config.layouts["three-tier"].required == ("MEMORY.md",)


def test_a_limit_that_some_memories_can_reach_is_right(tmp_path: Path) -> None:
    file = tmp_path / "sidecar.toml"
    file.write_text(
        '[limits]\nbytes = "1 GiB"\n[limits.layouts.claude-mem]\nfile_bytes = "2 GiB"\n'
        '[limits.memories."big/*"]\nbytes = "8 GiB"\n'
    )
    assert load_config(str(file), store=f"file:{tmp_path}/store").limits.of("big/one").bytes == 8 << 30


def test_a_limit_can_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[limits]\nbytes = 5\n")
    monkeypatch.setenv("MEMORY_SIDECAR_LIMITS_BYTES", "3 MB")
    monkeypatch.setenv("MEMORY_SIDECAR_LIMITS_OVER", "trim")
    monkeypatch.setenv("MEMORY_SIDECAR_GUARDS_ALLOW", "empty, shrunk")
    config = load_config(str(file))
    assert (config.limits.bytes, config.limits.over, config.guards.allow) == (3_000_000, "trim", ["empty", "shrunk"])
    monkeypatch.setenv("MEMORY_SIDECAR_LIMITS_BYTES", "-3")
    with pytest.raises(BadConfig, match="MEMORY_SIDECAR_LIMITS_BYTES"):
        load_config(str(file))


@pytest.mark.parametrize(
    ("variables", "text", "said"),
    [
        ("LIMITS_OVER=foo", "[limits]\nover = 'trim'\n", 'MEMORY_SIDECAR_LIMITS_OVER must be "reject" or "trim"'),
        ("RETENTION_KEEP_LAST=0", "", "MEMORY_SIDECAR_RETENTION_KEEP_LAST = 0 and nothing else"),
        ("SERVICE_BIND=x", "[service]\nbind = 'y'\n", "MEMORY_SIDECAR_SERVICE_BIND: 'x' is no address"),
        ("TIMING_COMMAND=inf", "", "MEMORY_SIDECAR_TIMING_COMMAND must be a finite number"),
        (
            "LIMITS_BYTES=1MB LIMITS_FILE_BYTES=2MB",
            "",
            "MEMORY_SIDECAR_LIMITS_FILE_BYTES is 2000000, more than MEMORY_SIDECAR_LIMITS_BYTES, which is 1000000",
        ),
        (
            "LIMITS_BYTES=1MB",
            "[limits]\nfile_bytes = '2 MB'\n",
            ":2: [limits] file_bytes is 2000000, more than MEMORY_",
        ),
        ("LIMITS_FILE_BYTES=2MB", "[limits]\nbytes = '1 MB'\n", "FILE_BYTES is 2000000, more than [limits] bytes"),
    ],
)
def test_a_wrong_variable_is_named(
    variables: str, text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pair in variables.split():
        name, _, value = pair.partition("=")
        monkeypatch.setenv(f"MEMORY_SIDECAR_{name}", value)
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(BadConfig) as refused:
        load_config(str(file))
    assert said in refused.value.message
    assert (str(file) in refused.value.message) == (":2: " in said)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("0", 0), ("4096", 4096), ("500 MB", 500_000_000), ("2 GiB", 2 << 30), ("1.5kb", 1500), ("3 tib", 3 << 40)),
        *(
            ("9 B", 9),
            ("1k", 1000),
            ("1 Ki", 1024),
            ("", None),
            ("MB", None),
            ("1 XB", None),
            ("-1", None),
            ("1 iB", None),
        ),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int | None) -> None:
    if size is not None:
        assert parse_size(text) == size
        return
    with pytest.raises(ValueError):
        parse_size(text)


def test_lines_are_found_past_strings_that_look_like_settings() -> None:
    text = '[a]\nx = """\nb = 1\n[c]\n"""\nb = 2\n["c.d"]\n"e f" = 1\nlist = [\n  "g = 1",\n]\nh = 1\n'
    lines = TomlLines(text)
    assert [lines.of(("a", "b")), lines.of(("c.d", "e f")), lines.of(("c.d", "h"))] == [6, 8, 12]
    assert [lines.of(("c",)), lines.of(("a", "z")), lines.of(("c.d", "e f", "deeper"))] == [0, 1, 8]


def test_the_defaults_trim_nothing() -> None:
    assert Limits().list_trimming() == []
