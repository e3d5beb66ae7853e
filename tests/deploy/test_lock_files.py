"""The lock files fit what pyproject.toml asks for, and the bill of materials fits the lock file."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[2]
OWN = "memory-sidecar"
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))
LOCKS = ("requirements.lock", "requirements-dev.lock")


@pytest.fixture(scope="module")
def lock() -> Any:
    """The script that writes them."""
    spec = importlib.util.spec_from_file_location("lock", PROJECT / "deploy" / "lock.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lock"] = module
    spec.loader.exec_module(module)
    return module


def asked(name: str) -> list[Requirement]:
    project = PYPROJECT["project"]
    rows = [*project["dependencies"], *(row for rows in project["optional-dependencies"].values() for row in rows)]
    rows += PYPROJECT["dependency-groups"]["dev"] if name == "requirements-dev.lock" else []
    return [one for one in map(Requirement, rows) if one.name != OWN]


@pytest.mark.parametrize("name", LOCKS)
def test_what_is_locked_is_what_the_project_asks_for(name: str, lock: Any) -> None:
    packages = {package.name: package for package in lock.read_lock((PROJECT / name).read_text("utf-8"))}
    for wanted in asked(name):
        package = packages[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(package.version, prereleases=True), f"{wanted}: run `make lock`"
    assert all(package.hashes for package in packages.values())
    assert OWN not in packages


def test_tests_run_with_the_versions_of_the_image(lock: Any) -> None:
    image, dev = (
        {one.name: one.version for one in lock.read_lock((PROJECT / name).read_text("utf-8"))} for name in LOCKS
    )
    assert image.items() <= dev.items()


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_does_not_say_where_packages_come_from(name: str) -> None:
    text = (PROJECT / name).read_text("utf-8")
    assert not re.search(r"://|index-url|find-links|trusted-host|/tmp", text)


def test_the_bill_of_materials_is_that_of_the_lock_file(lock: Any) -> None:
    packages = lock.read_lock((PROJECT / "requirements.lock").read_text("utf-8"))
    bill = json.loads((PROJECT / "deploy" / "sbom.cdx.json").read_text("utf-8"))
    assert bill == lock.build_bill(packages, PYPROJECT["project"]["version"]), "run `make sbom`"
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert {(row["name"], row["version"]) for row in bill["components"]} == {
        (one.name, one.version) for one in packages
    }
    refs = {row["bom-ref"] for row in (bill["metadata"]["component"], *bill["components"])}
    assert len(refs) == len(packages) + 1 == len(bill["dependencies"])
    # Everything is there because the product, or something that it needs, needs it.
    needed = {ref for row in bill["dependencies"] for ref in row["dependsOn"]}
    assert needed == refs - {bill["metadata"]["component"]["bom-ref"]}


def test_the_image_and_ci_install_by_hash() -> None:
    assert "--require-hashes -r requirements.lock" in (PROJECT / "Dockerfile").read_text("utf-8")
    makefile = (PROJECT / "Makefile").read_text("utf-8")
    assert all(f"--require-hashes -r {name}" in makefile for name in LOCKS)
    assert "export LOCKED=1" in (PROJECT / ".ci" / "run").read_text("utf-8")


def test_a_line_that_is_not_understood_is_not_passed_over(lock: Any) -> None:
    with pytest.raises(ValueError, match="no line of a lock file"):
        lock.read_lock("requests>=2\n")
