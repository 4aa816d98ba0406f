"""The required software, and its versions and builds without importing it."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from autotune.errors import InputError
from autotune.inspection.software import (
    NEWEST_TESTED,
    REQUIRED,
    check_required,
    installed_packages,
    newer_than_tested,
    torch_builds,
    torch_cuda_version,
)

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
GOOD = {name: metadata.version(name) for name in REQUIRED}


def test_the_required_versions_are_those_that_pip_installs() -> None:
    declared = map(Requirement, tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"])
    ranges = {requirement.name: requirement.specifier for requirement in declared}
    assert {name: ranges[name] for name in REQUIRED} == {name: SpecifierSet(text) for name, text in REQUIRED.items()}


def test_installed_packages_have_their_version_and_others_are_absent() -> None:
    found = installed_packages()
    assert {name: found[name] for name in REQUIRED} == GOOD
    assert "lomo-optim" not in found


@pytest.mark.parametrize(
    ("version", "origin", "installed"),
    [
        ("0.1.dev0", {"vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}}, r"0\.1\.dev0\+0123456789ab"),
        ("0.1+cpu", {"vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}}, r"0\.1\+cpu\.0123456789ab"),
        ("0.1.dev0", {"dir_info": {"editable": True}}, r"0\.1\.dev0\+[0-9a-f]{12}"),
        ("0.1", {"archive_info": {}}, r"0\.1"),
    ],
)
def test_code_from_a_repository_or_a_folder_is_told_apart_where_the_version_is_the_same(
    version: str, origin: dict[str, Any], installed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lomo_optim" / "inner").mkdir(parents=True)
    (tmp_path / "lomo_optim" / "__init__.py").touch()
    about = tmp_path / "lomo_optim.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lomo-optim\nVersion: {version}\n")
    (about / "direct_url.json").write_text(json.dumps({"url": "file:///here", **origin}))
    monkeypatch.syspath_prepend(tmp_path)
    before = installed_packages()["lomo-optim"]
    assert re.fullmatch(installed, before)
    assert SpecifierSet(">=0.1.dev0,<1").contains(before, prereleases=True)
    (tmp_path / "lomo_optim" / "inner" / "step.py").write_text("edited = True\n")
    assert (installed_packages()["lomo-optim"] != before) is ("dir_info" in origin)


def test_what_is_installed_here_will_do() -> None:
    check_required(installed_packages())


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_package_is_named_with_the_command_that_installs_it(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is not installed") as caught:
        check_required({package: version for package, version in GOOD.items() if package != name})
    assert caught.value.hint == f"Run: pip install '{name}{REQUIRED[name]}'"


@pytest.mark.parametrize(("name", "version"), [("trl", "1.15.0"), ("trl", "2.0.0"), ("optuna", "4.5.0")])
def test_a_version_outside_the_range_is_refused(name: str, version: str) -> None:
    with pytest.raises(InputError, match=f"{name} {version} is installed"):
        check_required({**GOOD, name: version})


def test_another_system_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(InputError, match="autotune needs Linux, and this is darwin"):
        check_required(GOOD)


def test_the_newest_tested_versions_are_those_of_the_readme_and_no_older_than_what_is_developed_with() -> None:
    lines = (line.partition("==") for line in (PYPROJECT.parent / "constraints.txt").read_text().splitlines())
    pinned = {name.lower(): version for name, _, version in lines}
    assert NEWEST_TESTED.keys() == REQUIRED.keys()
    assert all(Version(tested) >= Version(pinned[name]) for name, tested in NEWEST_TESTED.items())
    text = " ".join((PYPROJECT.parent / "README.md").read_text().split())
    assert f"torch {NEWEST_TESTED['torch']} and transformers {NEWEST_TESTED['transformers']}, and on" in text


@pytest.mark.parametrize(
    ("name", "version", "newer"),
    [
        ("torch", "2.13.0+cpu", False), ("torch", "2.15.3", False), ("torch", "2.16.0+cu140", True),
        ("trl", "1.17.0.dev0+3f2a", True), ("peft", "1.0", True), ("vllm", "99.0", False),
    ],
)  # fmt: skip
def test_a_release_after_the_newest_tested_one_is_known_and_a_bug_fix_is_not(
    name: str, version: str, newer: bool
) -> None:
    found = newer_than_tested({**NEWEST_TESTED, name: version})
    assert found == ({name: NEWEST_TESTED[name]} if newer else {})


@pytest.mark.parametrize("version", ["1.17.0.dev0", "1.99.0"])
def test_a_development_version_within_the_range_will_do(version: str) -> None:
    check_required({**GOOD, "trl": version})


def test_the_cuda_build_is_read_as_torch_itself_tells_it() -> None:
    assert torch_cuda_version() == torch.version.cuda


@pytest.mark.parametrize(
    ("source", "builds"),
    [
        ("from typing import Optional\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", {"cuda": "13.0"}),
        ("cuda = '12.8'\n", {"cuda": "12.8"}),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.0'\nrocm: Optional[str] = '7.0'\n", {"hip": "7.0"}),
        ("cuda: Optional[str] = None\nxpu: Optional[str] = '20260100'\n", {"xpu": "20260100"}),
        ("", {}),
    ],
)
def test_builds_for_other_devices_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, builds: dict[str, str]
) -> None:
    (tmp_path / "version.py").write_text(source)
    (tmp_path / "__init__.py").touch()

    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr("importlib.util.find_spec", lambda _: Spec)
    assert torch_builds() == builds
    assert torch_cuda_version() == builds.get("cuda")


def test_a_torch_without_its_version_is_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(InputError, match=r"torch is incomplete: .*version\.py is missing"):
        torch_cuda_version()


def test_the_rest_of_an_interrupted_installation_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"torch is not installed"):
        check_required(installed_packages())
