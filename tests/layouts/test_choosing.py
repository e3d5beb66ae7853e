"""Which layouts are found, where their roots are, what options add, and what a config file may say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adapters.sandboxes.local import LocalSandbox
from sidecar.config.settings import load_config
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.errors import BadConfig, UnknownLayout
from sidecar.format.protocol import ExportAnswer
from sidecar.layouts import Layout, choose_layouts, load_built_in
from sidecar.ports import Sandbox
from sidecar.receipts import ExportReceipt
from tests.parts.homes import OwnMachine, empty_home, engine_at, run_cli, write
from tests.parts.memories import BareSandbox, shell_tools
from tests.parts.samples import SAMPLES, leaked, pai

pytestmark = pytest.mark.usefixtures("forked_programs")


class Moved(OwnMachine):
    """A sandbox with some variables set."""

    def __init__(self, home: Path, **variables: object) -> None:
        super().__init__(home)
        self._environment = {**self._environment, **{name: str(value) for name, value in variables.items()}}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_at(tmp_path / "store")


async def names(engine: Engine, receipt: ExportReceipt) -> dict[str, str]:
    """The roots of a snapshot, and where they were."""
    manifest = await engine.repository.manifest(receipt.memory, receipt.snapshot or "")
    return {root.name: root.hint for root in manifest.roots}


async def out(engine: Engine, sandbox: LocalSandbox, *layouts: str) -> ExportReceipt:
    receipt = await export(engine, sandbox, ExportRequest(memory="m", layouts=layouts))
    assert receipt.outcome == "committed", receipt
    return receipt


async def test_whatever_is_there_is_found_and_a_name_limits_it(engine: Engine, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    for sample in SAMPLES.values():
        sample.build(home)
    write(home / ".codymaster/kanban.json", b"{}")
    found = await names(engine, await out(engine, LocalSandbox(home), "auto"))
    assert {"claude-code", "claude-mem", "codex", "codymaster", "opencode", "pai"} <= set(found)
    only = await export(engine, LocalSandbox(home), ExportRequest(memory="other", layouts=("codex", "pai")))
    assert set(await names(engine, only)) == {"codex", "pai", "pai-sessions"}


async def test_a_folder_without_memory_is_no_root(engine: Engine, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    SAMPLES["claude-mem"].build(home)
    write(home / ".codex/auth.json", b"{}")
    write(home / ".claude/settings.json", b"{}")
    assert set(await names(engine, await out(engine, LocalSandbox(home)))) == {"claude-mem"}
    other = empty_home(tmp_path / "other")
    await restore(engine, LocalSandbox(other), RestoreRequest(memory="m"))
    assert not (other / ".codex").exists()


@pytest.mark.parametrize(
    ("layout", "variable", "usual", "below"),
    [
        ("claude-code", "CLAUDE_CONFIG_DIR", ".claude", ""),
        ("codex", "CODEX_HOME", ".codex", ""),
        ("opencode", "XDG_DATA_HOME", ".local/share/opencode", "opencode"),
        ("pai", "PAI_DIR", ".config/opencode", ""),
    ],
)
async def test_a_variable_moves_a_root(
    layout: str, variable: str, usual: str, below: str, engine: Engine, tmp_path: Path
) -> None:
    home, place = empty_home(tmp_path / "home"), tmp_path / "data" / below
    SAMPLES[layout].build(home)
    place.parent.mkdir(parents=True, exist_ok=True)
    (home / usual).rename(place)
    receipt = await out(engine, Moved(home, **{variable: tmp_path / "data"}), layout)
    other = empty_home(tmp_path / "other")
    restored = await restore(engine, LocalSandbox(other), RestoreRequest(memory="m"))
    assert (restored.outcome, restored.files) == ("complete", receipt.files)
    assert (other / usual).is_dir() and not leaked(other)
    third = empty_home(tmp_path / "third")
    moved = Moved(third, **{variable: tmp_path / "moved"})
    assert (await restore(engine, moved, RestoreRequest(memory="m"))).outcome == "complete"
    assert (tmp_path / "moved" / below).is_dir() and not (third / usual).exists()
    assert (await export(engine, moved, ExportRequest(memory="m", layouts=(layout,)))).outcome == "unchanged"


@pytest.mark.parametrize("place", [".config/opencode", ".opencode", "app/.opencode"])
async def test_pai_is_where_its_memory_is(place: str, engine: Engine, tmp_path: Path) -> None:
    """Of the places it may be in, the first that holds MEMORY, and it goes back to the one it was in."""
    home, other = empty_home(tmp_path / "home"), empty_home(tmp_path / "other")
    pai(home)
    (home / place).parent.mkdir(exist_ok=True)
    (home / ".config/opencode").rename(home / place)
    (home / ".config/opencode").mkdir(parents=True, exist_ok=True)
    request = ExportRequest(memory="m", projects=("~/app",))
    found = await names(engine, await export(engine, LocalSandbox(home), request))
    assert found == {"pai": f"~/{place}/MEMORY", "pai-sessions": f"~/{place}"}
    await restore(engine, LocalSandbox(other), RestoreRequest(memory="m", projects=("~/app",)))
    assert (other / place / "MEMORY/STATE/current-work.json").is_file()
    assert (await export(engine, LocalSandbox(other), request)).outcome == "unchanged"


@pytest.mark.parametrize("python", [True, False])
async def test_pai_of_a_named_project_comes_back_in_that_project(python: bool, engine: Engine, tmp_path: Path) -> None:
    tools = shell_tools(tmp_path / "tools")

    def sandbox(home: Path) -> Sandbox:
        return LocalSandbox(home) if python else BareSandbox(home, tools)

    home, other = empty_home(tmp_path / "home"), empty_home(tmp_path / "other")
    write(home / "app/.opencode/MEMORY/WORK/x/META.yaml", b"title: x\n")
    write(home / "app/.opencode/projects/a.jsonl", b"{}\n")
    sent = await export(engine, sandbox(home), ExportRequest(memory="m", projects=("~/app",)))
    assert sent.outcome == "committed"
    waits = await restore(engine, sandbox(other), RestoreRequest(memory="m", withhold_projects=True))
    assert (waits.outcome, (other / "app").exists(), (other / ".opencode").exists()) == ("complete", False, False)
    assert {row.name for row in waits.withheld} >= {"pai", "pai-sessions"}
    third = empty_home(tmp_path / "third")
    assert (await restore(engine, sandbox(third), RestoreRequest(memory="m"))).outcome == "complete"
    assert (third / "app/.opencode/MEMORY/WORK/x/META.yaml").is_file() and not (third / ".opencode").exists()
    assert (third / "app/.opencode/projects/a.jsonl").is_file()


async def test_projects_keep_their_order_though_not_each_has_every_memory(engine: Engine, tmp_path: Path) -> None:
    home, other = empty_home(tmp_path / "home"), empty_home(tmp_path / "other")
    write(home / "a/MEMORY.md", b"a")
    write(home / "b/.cm/CONTINUITY.md", b"b")
    projects = ("~/a", "~/b")
    receipt = await export(engine, LocalSandbox(home), ExportRequest(memory="m", projects=projects))
    assert set(await names(engine, receipt)) == {"project", "cm-2"}
    await restore(engine, LocalSandbox(other), RestoreRequest(memory="m", projects=("~/x", "~/y")))
    assert (other / "x/MEMORY.md").is_file() and (other / "y/.cm/CONTINUITY.md").is_file()


# Options


def with_options(engine: Engine, **chosen: list[str]) -> Engine:
    layouts = {
        name: layout.with_options(chosen.get(name.replace("-", "_"), [])) for name, layout in load_built_in().items()
    }
    return replace(engine, layouts=layouts)


async def test_options_bring_what_they_say_and_no_secret(engine: Engine, tmp_path: Path) -> None:
    home, other = empty_home(tmp_path / "home"), empty_home(tmp_path / "other")
    for sample in SAMPLES.values():
        sample.build(home)
    write(home / ".config/opencode/MEMORY/RAW/.env", b"hunter2")
    engine = with_options(engine, pai=["raw", "security"], claude_code=["history"], claude_mem=["chroma"])
    await out(engine, LocalSandbox(home))
    await restore(engine, LocalSandbox(other), RestoreRequest(memory="m"))
    brought = [str(Path(path).relative_to(other)) for path in leaked(other)]
    assert sorted(brought) == [
        ".claude-mem/chroma-sync-state.json",
        ".claude-mem/chroma/vectors.bin",
        ".claude/history.jsonl",
        ".config/opencode/MEMORY/RAW/2026-11/all.jsonl",
        ".config/opencode/MEMORY/SECURITY/2026/events.jsonl",
    ]


async def test_vectors_are_restored_with_their_watermark_or_not_at_all(engine: Engine, tmp_path: Path) -> None:
    home, other = empty_home(tmp_path / "home"), empty_home(tmp_path / "other")
    SAMPLES["claude-mem"].build(home)
    await out(with_options(engine, claude_mem=["chroma"]), LocalSandbox(home))
    receipt = await restore(engine, LocalSandbox(other), RestoreRequest(memory="m"))
    assert receipt.outcome == "complete"
    assert not list((other / ".claude-mem").glob("chroma*"))
    assert {"claude-mem/chroma/vectors.bin", "claude-mem/chroma-sync-state.json"} <= {s.path for s in receipt.skipped}


# What a config file may say


def config(folder: Path, text: str) -> dict[str, Layout]:
    (folder / "c.toml").write_text(text)
    return dict(load_config(str(folder / "c.toml")).layouts)


def test_an_option_is_switched_on_without_writing_the_layout_again(tmp_path: Path) -> None:
    layouts = config(tmp_path, '[layouts.pai]\noptions = ["raw"]')
    assert (layouts["pai"].chosen, layouts["pai"].roots) == (("raw",), load_built_in()["pai"].roots)
    assert "RAW/**" in layouts["pai"].keep and "/RAW/" not in layouts["pai"].never
    assert set(layouts) == set(load_built_in())


MINE = "[layouts.mine]\nkeep = ['x']\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[layouts.pai]\noptions = ['rw']", "Did you mean 'raw'?"),
        ("[layouts.pai]\noptions = 'raw'", "list of names"),
        ("[layouts.pay]\noptions = ['raw']", "Did you mean 'pai'?"),
        (MINE + "[[layouts.mine.roots]]\nname = 'codex'\npaths = ['~/x']", "as codex has"),
        (MINE + "[[layouts.mine.roots]]\nname = 'mine-2'\npaths = ['~/x']", "[layouts.mine] root 'mine-2'"),
        (MINE + "[[layouts.mine.roots]]\nname = 'mine'\nproject = true\nbelow = '../x'", "must stay below"),
        ("[layouts.mine]\nkeep = ['/etc/x']\n[[layouts.mine.roots]]\nname = 'mine'\npaths = ['~/x']", "relative"),
        (MINE + "never = ['//x']\nroots = [{name = 'mine', paths = ['~/x']}]", "'//x' is not a pattern"),
        ("[layouts.mine]\nkeep = ['a/../b']\n[[layouts.mine.roots]]\nname = 'mine'\npaths = ['~/x']", "relative"),
        (MINE + "chosen = ['x']\n[[layouts.mine.roots]]\nname = 'mine'\npaths = ['~/x']", "unknown key"),
        (MINE + "tiers = {hott = ['x']}\nroots = [{name = 'mine', paths = ['~/x']}]", "Did you mean 'hot'?"),
        (MINE + "roots = [{name = 'mine', pats = ['~/x']}]", "Did you mean 'paths'?"),
        (MINE + "coupled = [{path = ['x']}]\nroots = [{name = 'mine', paths = ['~/x']}]", "[layouts.mine]"),
        (MINE + "keyed = 3\n[[layouts.mine.roots]]\nname = 'mine'\npaths = ['~/x']", "[layouts.mine] is not a layout"),
    ],
)
def test_a_wrong_layout_is_named(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig) as refused:
        config(tmp_path, text)
    assert words in f"{refused.value.message} {refused.value.hint}"


def test_auto_means_all_of_them_also_beside_others() -> None:
    known = load_built_in()
    assert (
        choose_layouts([], known)
        == choose_layouts(["auto"], known)
        == choose_layouts(["auto", "pai"], known)
        == [*known.values()]
    )
    assert choose_layouts(["pai", "codex", "pai"], known) == [known["pai"], known["codex"]]
    with pytest.raises(UnknownLayout, match="There is no layout 'pay'"):
        choose_layouts(["auto", "pay"], known)


NOTES = "[layouts.notes]\nkeep = ['n/**']\n[[layouts.notes.roots]]\nname = 'notes'\npaths = ['~/n']\n"
PLACED = {
    "root-of-another": (NOTES + NOTES.replace("notes]", "more]").replace("notes.", "more."), 9, "as notes has"),
    "root-twice": (NOTES + "[[layouts.notes.roots]]\npaths = ['~/m']\nname = 'notes'\n", 8, "root 'notes' twice"),
    "root": (NOTES.replace("'notes'", "'Notes'"), 4, "lower-case"),
    "tier": (NOTES + "[layouts.notes.tiers]\nhot = ['n/a']\nwarmish = ['x']\n", 8, "unknown key 'warmish'"),
    "tier-type": (NOTES + "[layouts.notes.tiers]\nhot = ['n/a']\nwarm = 3\n", 8, "not a layout"),
    "auto": (NOTES + NOTES.replace("notes", "auto"), 6, "whatever is there"),
    "option": ("[layouts.pai]\n\noptions = ['rw']\n", 3, "Did you mean 'raw'?"),
    "pattern": (NOTES.replace("[[", "never = ['../x']\n[["), 3, "relative to the root"),
    "word": (NOTES + "[[layouts.notes.coupled]]\npaths = ['n/{1a}.md', 'n/{1a}.txt']\n", 7, "begin with a digit"),
    "required": (NOTES.replace("[[", "required = ['m/a']\n[["), 3, "no path that this layout keeps"),
    "guard": (
        NOTES + "[guards.layouts.claude-mem]\nrequired = ['/claude-mem.db']\n",
        7,
        "no path that this layout keeps",
    ),
}


@pytest.mark.parametrize("case", PLACED)
def test_a_wrong_layout_is_named_with_its_line(case: str, tmp_path: Path) -> None:
    text, line, words = PLACED[case]
    with pytest.raises(BadConfig, match=rf"c\.toml:{line}: ") as refused:
        config(tmp_path, text)
    assert words in f"{refused.value.message} {refused.value.hint}"


def test_required_paths_may_be_patterns_and_folders(tmp_path: Path) -> None:
    required = ["claude-mem.db", "*.db", "{x,claude-mem}.db", "corpora/"]
    layouts = config(tmp_path, f"[guards.layouts.claude-mem]\nrequired = {required}\n")
    assert layouts["claude-mem"].required == tuple(required)


def test_a_layout_of_ones_own_is_found_exported_and_restored(tmp_path: Path) -> None:
    home, other, file = empty_home(tmp_path / "home"), empty_home(tmp_path / "other"), tmp_path / "c.toml"
    file.write_text(
        "[layouts.notes]\nkeep = ['notes/**']\ndatabases = ['*.db']\nnever = ['tmp/', '/a.md']\nsecrets = ['key']\n"
        "[[layouts.notes.roots]]\nname = 'notes'\nenv = ['NOTES_DIR']\npaths = ['~/notes-agent']\n"
    )
    write(home / "notes-agent/notes/a.md", b"a")
    write(home / "notes-agent/notes/key", b"hunter2")
    write(home / "notes-agent/notes/tmp/x", b"hunter2")
    exported = run_cli("export", "m", "--sandbox", f"local:{home}", "--config", file, store=tmp_path / "store")
    assert (exported.code, exported.document["files"]) == (0, 1)
    run_cli("restore", "m", "--sandbox", f"local:{other}", "--config", file, store=tmp_path / "store")
    assert (other / "notes-agent/notes/a.md").is_file() and not leaked(other)
    unknown = run_cli("restore", "m", "--sandbox", f"local:{other}", store=tmp_path / "store")
    assert (unknown.code, unknown.error) == (2, "unknown-layout")


def test_every_layout_is_sound() -> None:
    """What holds for a layout from a config holds for ours, and none lets a secret of another out."""
    from sidecar.layouts.custom import _check_layout, _check_roots

    for layout in load_built_in().values():
        assert _check_layout(layout) is layout
        for option in layout.options.values():
            assert not set(option.allow) & set(layout.secrets)
            assert set(option.allow) <= set(layout.never)
    _check_roots(load_built_in())
    assert ExportAnswer(status="unchanged", memory="m", snapshot="s").keyed == {}


# Extending a layout by single paths


def extended(tmp_path: Path, text: str) -> Layout:
    (tmp_path / "config.toml").write_text(text)
    return load_config(str(tmp_path / "config.toml")).layouts["claude-mem"]


def test_a_table_without_roots_adds_to_the_layout(tmp_path: Path) -> None:
    plain = load_built_in()["claude-mem"]
    more = extended(
        tmp_path,
        '[layouts.claude-mem]\ndatabases = ["memory.db"]\noptions = ["chroma"]\n'
        '[layouts.claude-mem.tiers]\nhot = ["memory.db"]\n[layouts.claude-mem.filters]\n"x.json" = ["TOKEN"]\n',
    )
    assert more.databases == (*plain.databases, "memory.db")
    assert (more.roots, more.required, more.chosen) == (plain.roots, plain.required, ("chroma",))
    assert more.tiers.hot == (*plain.tiers.hot, "memory.db") and more.tiers.warm == plain.tiers.warm
    assert set(more.filters) == {*plain.filters, "x.json"}


def test_a_table_with_roots_replaces_it(tmp_path: Path) -> None:
    text = '[layouts.claude-mem]\nkeep = ["x"]\n[[layouts.claude-mem.roots]]\nname = "claude-mem"\npaths = ["~/.claude-mem"]\n'
    other = extended(tmp_path, text)
    assert (other.keep, other.databases, other.never) == (("x",), (), ())


@pytest.mark.parametrize(
    ("line", "words"),
    [('database = ["x"]', "Did you mean 'databases'?"), ('databases = "x"', "databases"), ('keep = ["/x"]', "'/x'")],
)
def test_what_is_wrong_in_what_is_added_is_named(line: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig) as problem:
        extended(tmp_path, f"[layouts.claude-mem]\n{line}\n")
    assert words in f"{problem.value.message} {problem.value.hint}"
