"""What each policy does to an export, who is told, and that nothing is looked at twice."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tarfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.config.settings import load_config
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.archives.tarballs import adopt
from sidecar.engine.queries import list_snapshots, read_contents
from sidecar.engine.sandbox.dialogue import build_error
from sidecar.errors import BadConfig
from sidecar.format.protocol import ProgramError
from sidecar.policy.limits import Limits
from sidecar.policy.privacy import Privacy
from sidecar.policy.validation import check_privacy
from sidecar.program.capture.walk import FoundPath
from sidecar.program.privacy import credentials, scrub
from sidecar.program.privacy.screen import Screen
from sidecar.receipts import ExportReceipt, Scrubbed
from tests.parts.homes import OwnMachine, engine_at, run_cli, told, write
from tests.parts.in_process import InProcess
from tests.parts.memories import TOOLS
from tests.parts.secret_trees import everything_in

pytestmark = pytest.mark.usefixtures("forked_programs")

TOKEN = "ghp_" + "a1B2" * 9
SECRET = "zqjxkvw"
NOTE = f"# Notes\n\n<private>{SECRET}</private>\nkey {TOKEN}\n"


def home_with(path: Path, text: str = NOTE) -> Path:
    write(path / "app/memory/note.md", text.encode())
    write(path / "app/MEMORY.md", b"nothing to hide")
    return path


def observed(home: Path, *texts: str) -> None:
    place = home / ".claude-mem/claude-mem.db"
    place.parent.mkdir(exist_ok=True)
    connection = sqlite3.connect(place)
    connection.execute("CREATE TABLE IF NOT EXISTS observations (id INTEGER PRIMARY KEY, text TEXT)")
    connection.executemany("INSERT INTO observations (text) VALUES (?)", [(text,) for text in texts])
    connection.commit()
    connection.close()


async def exported(engine: Engine, home: Path, **more: Any) -> ExportReceipt:
    return await export(engine, InProcess(home), ExportRequest(memory="m", projects=(str(home / "app"),), **more))


async def exported_by_shell(engine: Engine, home: Path) -> ExportReceipt:
    """The same from a sandbox without Python."""
    tools = home.parent / "bin"
    tools.mkdir(exist_ok=True)
    for name in TOOLS:
        if (found := shutil.which(name)) and not (tools / name).exists():
            (tools / name).symlink_to(found)
    sandbox = OwnMachine(home)
    sandbox._environment = {"HOME": str(home), "PATH": str(tools)}
    return await export(engine, sandbox, ExportRequest(memory="m", projects=(str(home / "app"),)))


def stored(store: Path, text: str) -> bool:
    return any(text.encode() in data for _, data in everything_in(store))


def engine_with(tmp_path: Path, **privacy: Any) -> Engine:
    return engine_at(tmp_path / "store", privacy=Privacy(**privacy))


async def test_a_secret_setting_is_told_of_by_its_key(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home")
    observed(home, "harmless")
    settings = {"CLAUDE_MEM_GEMINI_API_KEY": SECRET, "CLAUDE_MEM_WORKER_PORT": "1", TOKEN + "_KEY": SECRET, "MODE": "x"}
    (home / ".claude-mem/settings.json").write_text(json.dumps(settings))
    receipt = await exported(engine_with(tmp_path, credentials="off"), home)
    found = [(row.name, row.action, row.column) for row in receipt.findings if row.path == "claude-mem/settings.json"]
    assert found == [
        ("setting", "removed", "CLAUDE_MEM_GEMINI_API_KEY"),
        ("setting", "removed", "[redacted:github-token]_KEY"),
    ]
    assert SECRET not in str(receipt) and TOKEN not in str(receipt.findings)
    assert not stored(tmp_path / "store", SECRET)


async def test_by_default_what_is_private_goes_and_credentials_go_too(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home")
    observed(home, "harmless", f"{TOKEN} and <private>{SECRET}</private>")
    before = (home / "app/memory/note.md").read_bytes(), (home / ".claude-mem/claude-mem.db").read_bytes()
    receipt = await exported(engine_at(tmp_path / "store"), home)
    assert receipt.outcome == "committed"
    found = [(row.path, row.name, row.action, row.line, row.column, row.row) for row in receipt.findings]
    assert sorted(found) == [
        ("claude-mem/claude-mem.db", "github-token", "redacted", 0, "observations.text", "2"),
        ("claude-mem/claude-mem.db", "private", "removed", 0, "observations.text", "2"),
        ("project/memory/note.md", "github-token", "redacted", 4, "", ""),
        ("project/memory/note.md", "private", "removed", 3, "", ""),
    ]
    assert receipt.found == {"removed": 2, "redacted": 2} and receipt.scrubbed == Scrubbed(private=2, credentials=2)
    assert TOKEN not in str(receipt) and SECRET not in str(receipt)
    assert not stored(tmp_path / "store", SECRET) and not stored(tmp_path / "store", TOKEN)
    # The agent's own files are as they were, and stay so when the same snapshot is restored where it came from.
    back = await restore(
        engine_at(tmp_path / "store"), InProcess(home), RestoreRequest(memory="m", projects=(str(home / "app"),))
    )
    assert back.outcome == "complete" and back.kept
    assert ((home / "app/memory/note.md").read_bytes(), (home / ".claude-mem/claude-mem.db").read_bytes()) == before


async def test_one_line_of_config_lets_credentials_leave_with_a_warning(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home")
    observed(home, TOKEN)
    receipt = await exported(engine_with(tmp_path, credentials="warn"), home)
    assert receipt.found == {"removed": 1, "warned": 2} and receipt.scrubbed == Scrubbed(private=1)
    assert any("Credentials found: 2" in warning for warning in receipt.warnings)
    assert TOKEN not in str(receipt) and stored(tmp_path / "store", TOKEN)


@pytest.mark.parametrize("mode", ["off", "warn", "redact", "refuse"])
async def test_each_way_with_credentials(mode: str, tmp_path: Path) -> None:
    home = home_with(tmp_path / "home", f"{TOKEN}\n")
    observed(home, TOKEN)
    engine = engine_with(tmp_path, credentials=mode, databases=mode)
    receipt = await exported(engine, home)
    assert (
        receipt.found == {"off": {}, "warn": {"warned": 2}, "redact": {"redacted": 2}, "refuse": {"refused": 2}}[mode]
    )
    if mode == "refuse":
        assert (receipt.outcome, receipt.snapshot, receipt.head) == ("rejected", None, None)
        assert receipt.reason is not None and receipt.reason.code == "credentials"
        assert "note.md line 1" in receipt.reason.message and TOKEN not in str(receipt)
        assert not (tmp_path / "store/memories").exists()
        assert (await exported(engine, home)).outcome == "rejected"
        allowed = await exported(engine, home, allow=("credentials",))
        assert (allowed.outcome, allowed.found) == ("committed", {"warned": 2})
        assert (await exported(engine, home)).outcome == "rejected"
    else:
        assert receipt.outcome == "committed"
        assert stored(tmp_path / "store", TOKEN) == (mode != "redact")
        assert receipt.scrubbed.credentials == (2 if mode == "redact" else 0)


async def test_what_is_kept_is_kept_to_the_byte(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home")
    engine = engine_with(tmp_path, private="keep", credentials="off", databases="off")
    assert (await exported(engine, home)).findings == []
    assert stored(tmp_path / "store", SECRET)


async def test_a_layout_and_a_memory_may_have_a_policy_of_their_own(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home")
    observed(home, f"<private>{SECRET}</private>")
    tables: dict[str, Any] = {
        "layouts": {"three-tier": {"private": "keep"}},
        "memories": {"other": {"private": "keep"}},
    }
    engine = engine_at(tmp_path / "store", privacy=Privacy(credentials="off", **tables))
    assert [row.path for row in (await exported(engine, home)).findings] == ["claude-mem/claude-mem.db"]
    request = ExportRequest(memory="other", projects=(str(home / "app"),))
    assert (await export(engine, InProcess(home), request)).findings == []


async def test_a_restore_does_not_pretend(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home")
    engine = engine_with(tmp_path, credentials="redact")
    _age(home)
    first = await exported(engine, home)
    write(home / "app/memory/other.md", b"more")
    second = await exported(engine, home)  # the note is as it was, so it is not read
    words = "1 private passage and 1 credential were taken out of this snapshot before it was stored."
    assert (first.scrubbed.words, second.scrubbed.words, second.findings) == (words, words, [])
    (tmp_path / "other/app").mkdir(parents=True)
    request = RestoreRequest(memory="m", projects=(str(tmp_path / "other/app"),))
    back = await restore(engine, InProcess(tmp_path / "other"), request)
    assert words in back.warnings and back.scrubbed == Scrubbed(private=1, credentials=1)
    expected = "# Notes\n\n[private]\nkey [redacted:github-token]\n"
    assert (tmp_path / "other/app/memory/note.md").read_text() == expected
    again = await exported(engine, tmp_path / "other")
    assert (again.outcome, again.findings) == ("unchanged", [])
    write(tmp_path / "other/app/memory/note.md", expected.encode() + b"more")
    third = await exported(engine, tmp_path / "other")
    for index in (tmp_path / "other/.cache/memory-sidecar/m").glob("index-*"):
        index.unlink()
    write(tmp_path / "other/app/memory/fourth.md", b"all is read again, and sent in full")
    fourth = await exported(engine, tmp_path / "other")
    assert fourth.kind == "full"
    assert (third.findings, third.scrubbed.words, fourth.scrubbed.words) == ([], words, words)
    rows = (await list_snapshots(engine.repository, "m")).snapshots
    assert [row.scrubbed for row in rows] == [2, 2, 2, 2]
    contents = await read_contents(engine.repository, "m", "latest")
    assert contents.manifest.scrubbed == {"project/memory/note.md": (1, 1)}


async def test_unchanged_files_are_not_looked_at_until_the_policy_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = home_with(tmp_path / "home")
    observed(home, "harmless")
    engine = engine_with(tmp_path, credentials="warn")
    looks: list[int] = []
    look = scrub.PrivacyPolicy.may_concern
    monkeypatch.setattr(
        scrub.PrivacyPolicy, "may_concern", lambda policy, data: looks.append(len(data)) or look(policy, data)
    )
    await exported(engine, home)
    assert looks
    for _ in range(2):  # the first reads what is too young to be believed
        await exported(engine, home)
        looks.clear()
        _age(home)
    await exported(engine, home)
    looks.clear()
    assert (await exported(engine, home)).outcome == "unchanged" and not looks
    stricter = replace(engine, privacy=Privacy(credentials="redact"))
    receipt = await exported(stricter, home)
    assert (receipt.outcome, receipt.found) == ("committed", {"removed": 1, "redacted": 1}) and looks
    await exported(stricter, home)
    looks.clear()
    assert (await exported(stricter, home)).outcome == "unchanged" and not looks
    before = stricter.privacy.for_sandbox([], {}).policy
    monkeypatch.setattr("sidecar.program.privacy.credentials.VERSION", credentials.VERSION + 1)
    assert stricter.privacy.for_sandbox([], {}).policy != before


async def test_a_stricter_policy_builds_on_nothing_that_holds_what_is_private(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home")
    write(home / "app/memory/.npmrc", b"zqjxkvw")
    observed(home, f"<private>{SECRET}</private>")
    loose = await exported(engine_with(tmp_path, private="keep", credentials="off", databases="off"), home)
    for engine, kind in ((engine_with(tmp_path, credentials="warn"), "full"), (engine_with(tmp_path), "full")):
        receipt = await exported(engine, home)
        assert (receipt.outcome, receipt.kind, receipt.parent) == ("committed", kind, loose.snapshot)
        manifest = await engine.repository.manifest("m", receipt.snapshot or "")
        assert len(manifest.packs) == 1
        for path, data in everything_in(tmp_path / "store"):
            if manifest.packs[0].id in path.name:
                assert SECRET.encode() not in data
        loose = receipt
    write(home / "app/memory/more.md", b"more")
    assert (await exported(engine, home)).kind == "delta"


@pytest.mark.parametrize("change", [{"filters": {"settings.json": ("X_*",)}}, {"emptied": {"claude-mem.db": ("t",)}}])
async def test_what_a_layout_now_keeps_out_leaves_files_that_did_not_change(
    change: dict[str, Any], tmp_path: Path
) -> None:
    home = home_with(tmp_path / "home", "plain")
    write(home / ".claude-mem/settings.json", f'{{"X_1": "{SECRET}", "Y": 1}}'.encode())
    observed(home, "plain")
    connection = sqlite3.connect(home / ".claude-mem/claude-mem.db")
    connection.executescript(f"CREATE TABLE t (a); INSERT INTO t VALUES ('{SECRET}')")
    connection.close()
    engine = engine_with(tmp_path)
    await exported(engine, home)
    _age(home)
    assert (await exported(engine, home)).outcome == "unchanged"
    layouts = {**engine.layouts, "claude-mem": replace(engine.layouts["claude-mem"], **change)}
    receipt = await exported(replace(engine, layouts=layouts), home)
    assert (receipt.outcome, receipt.kind) == ("committed", "full")
    (tmp_path / "other").mkdir()
    await restore(engine, InProcess(tmp_path / "other"), RestoreRequest(memory="m"))
    left = {name: (tmp_path / "other/.claude-mem" / name).read_bytes() for name in ("settings.json", "claude-mem.db")}
    assert [name for name, data in left.items() if SECRET.encode() in data] == (
        ["claude-mem.db"] if "filters" in change else ["settings.json"]
    )


async def test_layouts_that_are_not_asked_for_stay_when_the_policy_changes(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home")
    observed(home, f"<private>{SECRET}</private>")
    await exported(engine_with(tmp_path, private="keep"), home)
    engine = engine_with(tmp_path)
    part = await exported(engine, home, layouts=("three-tier",))
    assert (part.outcome, part.kind, part.files) == ("committed", "delta", 3)
    whole = await exported(engine, home)
    assert (whole.outcome, whole.kind, whole.scrubbed.private) == ("committed", "full", 2)


def _age(home: Path) -> None:
    """Let the files be older than a tick of the file system's clock."""
    time.sleep(0.15)


async def test_what_was_restored_under_the_same_policy_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(tmp_path)
    await exported(engine, home_with(tmp_path / "home"))
    (tmp_path / "other/app").mkdir(parents=True)
    await restore(
        engine, InProcess(tmp_path / "other"), RestoreRequest(memory="m", projects=(str(tmp_path / "other/app"),))
    )
    await exported(engine, tmp_path / "other")  # reads what is too young to be believed
    _age(tmp_path)
    await exported(engine, tmp_path / "other")
    monkeypatch.setattr(scrub.PrivacyPolicy, "may_concern", None)
    assert (await exported(engine, tmp_path / "other")).outcome == "unchanged"


async def test_known_secret_files_and_settings_stay_behind(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home", "plain")
    secret = {".env", ".env.local", ".envrc", "prod.env", ".netrc", "id_ed25519", "store.p12", ".npmrc", ".vault-token"}
    for name in secret:
        write(home / "app/memory/deep" / name, SECRET.encode())
    write(
        home / ".claude-mem/settings.json",
        f'{{"X_API_KEY": "{SECRET}", "NOTE": "<private>{SECRET}</private> x"}}'.encode(),
    )
    receipt = await exported(engine_with(tmp_path), home)
    assert {row.path.rpartition("/")[2] for row in receipt.skipped if row.reason == "secret"} == secret
    assert not stored(tmp_path / "store", SECRET) and stored(tmp_path / "store", "[private] x")


SECRETS = (
    *("auth.json", "oauth.json", "secrets.json", "token.json", "credentials.json", "server.pem", "server.key"),
    *("id_rsa.bak", "id_ed25519~", ".env.old", ".git/config", ".git/credentials", "browser/Cookies", "cookies.sqlite"),
    *(".aws/credentials", ".kube/config", ".docker/config.json", "Auth.JSON", "prod.env.bak"),
    *(
        ".ssh/id_work",
        ".config/gh/hosts.yml",
        "service-account.json",
        "client_secret.json",
        "vpn.ovpn",
        ".databrickscfg",
    ),
)
NOTES = (
    "credentials.md",
    "cookies.md",
    "auth.md",
    "config",
    "config.json",
    "tokens.json",
    "key.md",
    "id_rsa.pub",
    "id_map",
)


@pytest.mark.parametrize("shell", [False, True], ids=["python", "shell"])
async def test_what_is_secret_by_its_name_stays_behind_in_a_folder_of_unknown_files(
    shell: bool, tmp_path: Path
) -> None:
    home = home_with(tmp_path / "home", "plain")
    for name in SECRETS:
        write(home / ".claude-mem" / name, SECRET.encode())
    for name in NOTES:
        write(home / "app/memory" / name, name.encode())
    receipt = await (exported_by_shell if shell else exported)(engine_with(tmp_path), home)
    assert {row.path for row in receipt.skipped if row.reason == "secret"} == {f"claude-mem/{name}" for name in SECRETS}
    assert not stored(tmp_path / "store", SECRET)
    assert all(stored(tmp_path / "store", f"project/memory/{name}") for name in NOTES)


@pytest.mark.parametrize("shell", [False, True], ids=["python", "shell"])
async def test_copies_of_settings_stay_behind_with_the_keys_in_them(shell: bool, tmp_path: Path) -> None:
    copies = {"settings.json.bak", "settings.json~", "settings.old.json", "settings-2.json", "Settings.json"}
    home = home_with(tmp_path / "home", "plain")
    for name in ("settings.json", "backup/settings.json", "old-1/b/settings.json", *copies):
        write(home / ".claude-mem" / name, f'{{"X_API_KEY": "{SECRET}", "NOTE": "kept"}}'.encode())
    receipt = await (exported_by_shell if shell else exported)(engine_with(tmp_path), home)
    assert receipt.outcome == "committed" and not stored(tmp_path / "store", SECRET)
    assert shell or stored(tmp_path / "store", '"NOTE"')  # a shell cannot filter, and leaves settings.json out too
    assert {f"claude-mem/{name}" for name in copies} <= {row.path for row in receipt.skipped if row.reason == "secret"}


async def test_what_cannot_be_cleared_is_left_out_with_the_reason(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home", "plain")
    write(home / "app/memory/odd.bin", b"\0\1<private>" + SECRET.encode())
    write(home / "app/memory/torn.jsonl", b'{"a": "<private>' + SECRET.encode() + b'"}\n' + bytes(64))
    receipt = await exported(engine_with(tmp_path), home)
    assert [(row.path, row.reason[:10]) for row in receipt.skipped] == [("project/memory/odd.bin", "not a text")]
    assert not stored(tmp_path / "store", SECRET) and stored(tmp_path / "store", '{"a": "[private]"}\n\0')


@pytest.mark.parametrize("mode", ["off", "warn", "redact", "refuse"])
async def test_in_a_binary_file_a_credential_is_overwritten_and_nothing_moves(mode: str, tmp_path: Path) -> None:
    home = home_with(tmp_path / "home", "plain")
    write(home / "app/memory/state.pickle", b"x\0y " + TOKEN.encode() + b" z")
    receipt = await exported(engine_with(tmp_path, credentials=mode), home)
    found = {"off": {}, "warn": {"warned": 1}, "redact": {"redacted": 1}, "refuse": {"refused": 1}}
    assert receipt.found == found[mode] and receipt.skipped == []
    assert stored(tmp_path / "store", f"x\0y {TOKEN} z") == (mode in ("off", "warn"))
    mark = "[redacted:github-token]".ljust(len(TOKEN), "*")
    assert stored(tmp_path / "store", f"x\0y {mark} z") == (mode == "redact")


@pytest.mark.parametrize("secret", [f"<private>{SECRET}</private>", TOKEN])
async def test_what_lies_across_the_blocks_of_a_file_is_found(secret: str, tmp_path: Path) -> None:
    engine = engine_with(tmp_path, credentials="redact")
    for before in (3, len(secret) // 2, len(secret) - 1):
        home = home_with(tmp_path / f"home-{before}", "x" * (65536 - before - 1) + " " + secret + " " + "x" * 65536)
        receipt = await exported(engine, home, force=True)
        assert sum(receipt.found.values()) == 1
    assert not stored(tmp_path / "store", SECRET) and not stored(tmp_path / "store", TOKEN)


async def test_the_list_has_an_end_but_all_are_counted(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home", f"<private>{SECRET}</private>\n" * 300)
    observed(home, *[f"<private>{SECRET}</private>" * 3] * 100)
    receipt = await exported(engine_with(tmp_path), home)
    assert (len(receipt.findings), receipt.findings_more, receipt.found) == (200, 400, {"removed": 600})
    assert receipt.scrubbed == Scrubbed(private=600)


@pytest.mark.parametrize("mode", ["off", "warn", "redact", "refuse"])
async def test_names_and_targets_of_links_are_looked_at_too(mode: str, tmp_path: Path) -> None:
    home = home_with(tmp_path / "home", "plain")
    names = f"{TOKEN}.md", f"{TOKEN}/a.md", f"{TOKEN}/b.md"
    for name in names:
        write(home / "app/memory" / name, b"plain")
    (home / "app/memory/link.md").symlink_to(f"{TOKEN}.md")
    write(home / f"app/memory/{TOKEN}.lock", b"never exported")
    engine = engine_with(tmp_path, credentials=mode)
    receipt = await exported(engine, home)
    shown = "project/memory/[redacted:github-token]"
    places = [(shown, "(name)"), (f"{shown}.md", "(name)"), ("project/memory/link.md", "(link target)")]
    action = {"warn": "warned", "refuse": "refused"}.get(mode, "")
    assert sorted((row.path, row.column) for row in receipt.findings) == (sorted(places) if action else [])
    assert receipt.found == ({action: 3} if action else {})
    left_out = {row.path: row.reason[:12] for row in receipt.skipped if row.reason != "never exported"}
    assert left_out == ({path: "a credential" for path, _ in places} if mode == "redact" else {})
    assert TOKEN not in str(receipt)
    assert receipt.outcome == ("rejected" if mode == "refuse" else "committed")
    assert stored(tmp_path / "store", TOKEN) == (mode in ("off", "warn"))
    if mode == "refuse":
        assert receipt.reason is not None and receipt.reason.code == "credentials"
        assert "[redacted:github-token] (name)" in receipt.reason.message
    again = await exported(engine, home)
    assert [row.path for row in again.findings] == ([row.path for row in receipt.findings] if mode == "refuse" else [])


async def test_what_has_something_private_in_its_name_stays_behind(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home", "plain")
    for name in (f"a <private>{SECRET}.md", f"<PRIVATE>{SECRET}</private>/a.md", f"<PRIVATE>{SECRET}</private>/b.md"):
        write(home / "app/memory" / name, b"plain")
    (home / "app/memory/link.md").symlink_to(f"a <private>{SECRET}.md")
    receipt = await exported(engine_with(tmp_path), home)
    shown = ["[private]", "[private]/a.md", "[private]/b.md", "a [private]", "link.md"]
    assert sorted(row.path for row in receipt.skipped) == [f"project/memory/{name}" for name in shown]
    assert all(row.reason.startswith("there is something private in") for row in receipt.skipped)
    assert receipt.outcome == "committed" and SECRET not in str(receipt) and not stored(tmp_path / "store", SECRET)


async def test_no_receipt_says_a_name_with_a_credential(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home", "plain")
    write(home / f"app/memory/{TOKEN}/a.md", b"plain")
    connection = sqlite3.connect(home / f"app/memory/{TOKEN}/a.db")
    connection.executescript("CREATE TABLE t (a)")
    connection.close()
    engine = engine_with(tmp_path, credentials="warn")
    receipt = await exported(engine, home)
    seed = RestoreRequest(memory="m", projects=(str(home / "app"),), mode="seed")
    again = await restore(engine, InProcess(home), seed)
    (tmp_path / "other/app").mkdir(parents=True)
    request = RestoreRequest(memory="m", projects=(str(tmp_path / "other/app"),))
    back = await restore(engine, InProcess(tmp_path / "other"), request)
    place = "project/memory/[redacted:github-token]/a.db"
    assert [row.path for row in receipt.databases] == [row.path for row in back.databases] == [place]
    assert again.skipped and TOKEN not in f"{receipt} {again} {back}"


async def test_nor_does_an_error(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home", "plain")
    write(home / f"app/memory/{TOKEN}.md", bytes(100_000))
    engine = engine_with(tmp_path)
    receipt = await exported(replace(engine, limits=Limits(file_bytes=50_000)), home)
    assert receipt.reason is not None and "project/memory/[redacted:github-token].md" in receipt.reason.message
    assert TOKEN not in str(receipt)
    unreadable = ProgramError(code="unreadable", message=f"project/memory/{TOKEN}.md may not be read by this user.")
    assert TOKEN not in str(build_error(unreadable))


async def test_a_name_that_was_looked_at_is_not_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = home_with(tmp_path / "home", "plain")
    (home / "app/memory/link.md").symlink_to("note.md")
    await exported(engine_with(tmp_path), home)
    looks: list[str] = []
    look, look_over = credentials.redact_name, Screen.look_over

    def note(screen: Screen, found: Iterable[FoundPath]) -> None:
        paths = list(found)
        looks.extend(one.path for one in paths)
        look_over(screen, paths)

    monkeypatch.setattr(credentials, "redact_name", lambda text, rules: looks.append(text) or look(text, rules))
    monkeypatch.setattr(Screen, "look_over", note)
    write(home / "app/memory/new.md", b"new")
    write(home / "app/memory/note.md", b"changed")
    await exported(engine_with(tmp_path), home)
    assert looks == ["project/memory/new.md"]
    (home / "app/memory/link.md").unlink()
    (home / "app/memory/link.md").symlink_to("new.md")
    looks.clear()
    await exported(engine_with(tmp_path), home)
    assert looks == ["new.md"]


async def test_what_only_begins_like_json_is_no_json(tmp_path: Path) -> None:
    todo = f'[ ] replace the 12" pipe <private>x said "maybe" {SECRET}</private> done'
    home = home_with(tmp_path / "home", todo)
    observed(home, todo, f'{{"a": "<private>{SECRET}", "b": 1}}')
    receipt = await exported(engine_with(tmp_path), home)
    assert sorted(row.name for row in receipt.findings) == ["private", "private", "private-unclosed"]
    assert not told(receipt) and not stored(tmp_path / "store", SECRET)
    for left in ('[ ] replace the 12" pipe [private] done', '{"a": "[private]", "b": 1}'):
        assert stored(tmp_path / "store", left)


async def test_one_that_is_never_closed_is_said_loudly(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home", f"kept\n<private>{SECRET}\nall of it")
    receipt = await exported(engine_with(tmp_path), home)
    assert [row.name for row in receipt.findings] == ["private-unclosed"]
    assert any("never closed (line 2)" in warning for warning in receipt.warnings)


async def test_without_python_it_is_taken_out_before_anything_is_stored(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home")
    write(home / f"app/memory/{TOKEN}.md", b"plain")
    receipt = await exported_by_shell(engine_with(tmp_path), home)
    assert receipt.outcome == "committed" and receipt.found == {"removed": 1, "redacted": 1}
    assert TOKEN not in str(receipt)
    assert any("left the sandbox" in warning for warning in receipt.warnings)
    assert not stored(tmp_path / "store", SECRET) and not stored(tmp_path / "store", TOKEN)
    refusing = engine_with(tmp_path, credentials="refuse")
    refused = await exported_by_shell(refusing, home)
    assert (refused.outcome, refused.reason and refused.reason.code) == ("rejected", "credentials")


async def test_an_import_goes_through_the_same(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home")
    write(home / f"app/memory/{TOKEN}.md", b"plain")
    with tarfile.open(tmp_path / "home.tar", "w") as tar:
        tar.add(home / "app", "app")
    receipt = await adopt(engine_with(tmp_path), tmp_path / "home.tar", ExportRequest(memory="m"))
    assert receipt.outcome == "committed" and receipt.found == {"removed": 1, "redacted": 1}
    assert (
        not stored(tmp_path / "store", SECRET) and not stored(tmp_path / "store", TOKEN) and TOKEN not in str(receipt)
    )


def test_the_command_line_says_where_and_never_what(tmp_path: Path) -> None:
    home, store = home_with(tmp_path / "home"), tmp_path / "store"
    words = ("export", "m", "--sandbox", f"local:{home}", "--project", str(home / "app"))
    refused = run_cli(*words, store=store, env={"MEMORY_SIDECAR_PRIVACY_CREDENTIALS": "refuse"})
    assert (refused.code, refused.error) == (3, "credentials") and not (store / "memories").exists()
    done = run_cli(*words, store=store, env={"MEMORY_SIDECAR_PRIVACY_CREDENTIALS": "redact"})
    assert done.code == 0 and done.document["scrubbed"] == {"private": 1, "credentials": 1}
    assert TOKEN not in str(done) + str(refused) and SECRET not in str(done)
    shown = run_cli("show", "m", store=store)
    assert shown.document["scrubbed"] == {"project/memory/note.md": [1, 1]}
    wrong = run_cli(*words, store=store, env={"MEMORY_SIDECAR_PRIVACY_PRIVATE": "hide"})
    assert wrong.code == 2


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[privacy]\nprivate = 'removed'\n", 2, "Did you mean 'remove'?"),
        ("[privacy]\ncredentials = 'redacted'\n", 2, "Did you mean 'redact'?"),
        ("[privacy]\ndatabases = 3\n", 2, "not valid"),
        ("[privacy]\nsecrets = 'warn'\n", 2, "unknown key"),
        ("[privacy.layouts.claude-men]\nprivate = 'keep'\n", 1, "Did you mean 'claude-mem'?"),
        ("[privacy.layouts.claude-mem]\nprivate = 'warn'\n", 2, '"remove" or "keep"'),
        ("[privacy.memories.'a/**']\nprivate='keep'\n[privacy.memories.'a/b']\nprivate='keep'\n", 3, "never reached"),
    ],
)
def test_a_wrong_setting_is_named_with_its_line(text: str, line: int, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(BadConfig) as refused:
        load_config(str(file))
    assert refused.value.message.startswith(f"{file}:{line}: "), refused.value.message
    assert words in f"{refused.value.message} {refused.value.hint}"


RULE = {"name": "staff-number", "keyword": "taff no", "pattern": "[Ss]taff no[.] ([0-9]{6})(?![0-9])"}


async def test_a_rule_of_ones_own_is_applied_in_files_and_databases(tmp_path: Path) -> None:
    home = home_with(tmp_path / "home", "Staff no. 123456 and staff no. 1234567")
    observed(home, "staff no. 654321")
    await exported(engine_with(tmp_path), home)
    _age(home)
    assert (await exported(engine_with(tmp_path), home)).outcome == "unchanged"
    engine = engine_at(tmp_path / "store", privacy=check_privacy(Privacy(rules=[RULE]), ()))
    receipt = await exported(engine, home)  # nothing changed but the policy
    assert receipt.kind == "full" and receipt.found == {"redacted": 2}
    assert sorted((row.path, row.name) for row in receipt.findings) == [
        ("claude-mem/claude-mem.db", "staff-number"),
        ("project/memory/note.md", "staff-number"),
    ]
    (tmp_path / "other/app").mkdir(parents=True)
    request = RestoreRequest(memory="m", projects=(str(tmp_path / "other/app"),))
    await restore(engine, InProcess(tmp_path / "other"), request)
    left = "Staff no. [redacted:staff-number] and staff no. 1234567"
    assert (tmp_path / "other/app/memory/note.md").read_text() == left
    assert (await exported(engine, tmp_path / "other")).outcome == "unchanged"


@pytest.mark.parametrize(
    ("rule", "line", "words"),
    [
        ("name = 'a'\npattern = 'ACME-[0-9]+'", 3, "repeat without an end"),
        ("name = 'a'\npattern = '(?:ACME-[0-9]{1,9}){1,9}'", 3, "repeat in a repeat"),
        ("name = 'a'\npattern = 'ACME-(?:a|ab){1,30}'", 3, "alternatives in a repeat"),
        ("name = 'a'\npattern = '[a-z]{1,90}[a-z]{1,90}ACME-'\nkeyword = 'ACME-'", 3, "too many ways"),
        ("name = 'a'\npattern = 'ACME-(x)\\1'", 3, "another group"),
        ("name = 'a'\npattern = 'ACME-(?>x)'", 3, "atomic group"),
        ("name = 'a'\npattern = 'ACME-[0-9'", 3, "no regular expression"),
        ("name = 'a'\npattern = 'ACM'", 3, "fewer than 4"),
        ("name = 'a'\npattern = 'ACME-[0-9]{1,2000}'", 3, "more than 1000"),
        ("name = 'a'\npattern = '[0-9]{6,9}'", 1, "keyword"),
        ("name = 'a'\npattern = 'ACME-[0-9]{6}'\nkeyword = 'acne'", 4, "keyword"),
        ("name = 'A b'\npattern = 'ACME-[0-9]{6}'", 2, "small letters"),
        ("name = 'github-token'\npattern = 'ACME-[0-9]{6}'", 2, "no kind that is known"),
        ("name = 'acme'\npattern = 'acme'", 2, "Choose a name"),
        ("name = 'a'\npatern = 'ACME-[0-9]{6}'", 3, "Did you mean 'pattern'?"),
        ("pattern = 'ACME-[0-9]{6}'", 1, "name is missing"),
        ("name = 'a'\npattern = 7", 1, "not valid"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_with_its_line(rule: str, line: int, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[[privacy.rules]]\n{rule}\n")
    with pytest.raises(BadConfig) as refused:
        load_config(str(file))
    assert refused.value.message.startswith(f"{file}:{line}: "), refused.value.message
    assert words in f"{refused.value.message} {refused.value.hint}"


def test_two_rules_may_not_have_one_name_nor_find_each_others_marks(tmp_path: Path) -> None:
    for first, second in (("acme", "acme"), ("acme", "zzzz-9")):
        rules = [{"name": first, "pattern": "zzzz-[0-9]{1,4}"}, {"name": second, "pattern": "ACME-[0-9]{6}"}]
        with pytest.raises(BadConfig):
            check_privacy(Privacy(rules=rules), ())


async def test_what_is_only_mentioned_stays_and_is_said(tmp_path: Path) -> None:
    text = "# How we work\n\nUse <private> tags for what is nobody's business.\n\n" + "We deploy on Fridays.\n" * 100
    home = home_with(tmp_path / "home", text)
    receipt = await exported(engine_with(tmp_path), home)
    assert receipt.findings == [] and receipt.scrubbed == Scrubbed()
    assert any("never closed (line 3), but is only mentioned" in warning for warning in receipt.warnings)
    assert stored(tmp_path / "store", text)
