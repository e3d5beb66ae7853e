"""Tables for some memories: the first pattern that fits counts, and one that nothing can reach is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.config.settings import load_config
from sidecar.errors import BadConfig
from sidecar.policy.retention import KeepLast
from sidecar.policy.validation import check_reachable

SETTINGS = {"limits": "files", "guards": "shrink_from_files", "retention": "keep_last", "privacy": "private"}


def config(tmp_path: Path, section: str, *patterns: str) -> Path:
    value = "'keep'" if section == "privacy" else 1
    file = tmp_path / "c.toml"
    file.write_text(
        "".join(f"[{section}.memories.'{pattern}']\n{SETTINGS[section]} = {value}\n" for pattern in patterns)
    )
    return file


@pytest.mark.parametrize("section", SETTINGS)
def test_a_pattern_that_is_never_reached_is_refused_in_every_section(section: str, tmp_path: Path) -> None:
    for patterns, why in ((["**", "acme/*"], "taken by '**' before it"), (["a", ""], "it fits no memory")):
        file = config(tmp_path, section, *patterns)
        with pytest.raises(BadConfig) as refused:
            load_config(str(file))
        assert refused.value.message.startswith(f"{file}:3: [{section}.memories] {patterns[1]!r} is never reached: ")
        assert why in refused.value.message
    load_config(str(config(tmp_path, section, "acme/*", "**")))


def test_a_star_stays_within_one_part_of_an_id_in_every_section(tmp_path: Path) -> None:
    assert load_config(str(config(tmp_path, "limits", "acme/*"))).limits.of("acme/team/a").files > 1
    retention = load_config(str(config(tmp_path, "retention", "acme/*"))).retention
    assert retention.build_policy_for("acme/a").rules == (KeepLast(1),)
    assert retention.build_policy_for("acme/team/a").rules == ()


@pytest.mark.parametrize(
    ("patterns", "reached"),
    [
        (["*", "**"], True),
        (["*/*", "**"], True),
        (["?", "??", "*"], True),
        (["a?*", "a*"], True),
        (["a", "{a,b}"], True),
        (["a", "a/"], True),
        (["**/x", "**/y"], True),
        (["a", "b", "{a,b}"], False),
        (["a/", "a/b/c"], False),
        (["**", "*/*"], False),
        (["*", "a?"], False),
        (["**/x", "a/**/x"], False),
        (["a", "a"], False),
    ],
)
def test_what_is_reached(patterns: list[str], reached: bool) -> None:
    if reached:
        check_reachable(patterns, ("limits", "memories"))
        return
    with pytest.raises(BadConfig, match="never reached"):
        check_reachable(patterns, ("limits", "memories"))
