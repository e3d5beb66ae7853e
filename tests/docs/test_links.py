"""Links in Markdown files lead somewhere, and each page of docs/ is listed once in the README."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.parts.homes import PROJECT

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ELSEWHERE = ("http://", "https://", "mailto:")


def _pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [page for name in listed.stdout.splitlines() if (page := PROJECT / name).exists()]


def _prose(page: Path) -> str:
    """Without blocks and pieces of code, in which brackets mean something else."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`+[^`\n]*`+", lambda code: re.sub(r"[\[\]()]", "", code[0]), text)


@cache
def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    anchors: set[str] = set()
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = sum(1 for anchor in anchors if re.fullmatch(re.escape(words) + r"(-\d+)?", anchor))
        anchors.add(f"{words}-{number}" if number else words)
    return anchors


@pytest.mark.parametrize("page", _pages(), ids=lambda page: str(page.relative_to(PROJECT)))
def test_no_link_is_dead(page: Path) -> None:
    dead = []
    for link in LINK.findall(_prose(page)):
        if link.startswith(ELSEWHERE):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (page.parent / name).resolve() if name else page
        inside = target.is_relative_to(PROJECT) and target.exists()
        if not inside or (anchor and (target.suffix != ".md" or anchor not in _anchors(target))):
            dead.append(link)
    assert dead == []


def test_each_page_is_listed_once_in_the_readme() -> None:
    links = [link.partition("#")[0] for link in LINK.findall(_prose(PROJECT / "README.md"))]
    records = PROJECT / "docs/decisions"  # ARCHITECTURE.md has the list of these
    below = [page for page in _pages() if page.is_relative_to(PROJECT / "docs") and not page.is_relative_to(records)]
    pages = [str(page.relative_to(PROJECT)) for page in below]
    assert {page: links.count(page) for page in pages} == dict.fromkeys(pages, 1)


def test_the_readme_fits_on_two_screens() -> None:
    assert len((PROJECT / "README.md").read_text().splitlines()) <= 170
