"""Adding a technique is adding one file: it shows up wherever techniques are spoken of."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.runs import ROOT, autotune

NEW_FILE = '''
"""``weight_decay``: a technique that exists in this test only."""

from autotune.techniques.base import Option, Technique


class WeightDecay(Technique):
    """A knob for the test."""

    name = "weight_decay"
    summary = "Shrinks weights a little at every step."
    options = (Option("off", "no decay"), Option("on", "a decay of 0.1"))
    trl_default = "off"
    writes = frozenset({"args.weight_decay"})

    def plan(self, choice, candidate, setting):
        """Write the decay."""
        return {"args.weight_decay": 0.1 if choice == "on" else 0.0}
'''


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with one more file."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("autotune", "search_spaces", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "autotune" / "techniques" / "weight_decay.py").write_text(NEW_FILE, encoding="utf-8")
    return root


def test_it_is_in_the_catalogue(checkout: Path) -> None:
    ended = autotune("techniques", "--json", folder=checkout, root=checkout)
    assert ended.code == 0, ended.err
    assert "weight_decay" in ended.out


def test_it_is_in_the_help(checkout: Path) -> None:
    assert "weight_decay" in autotune("probe", "--help", folder=checkout, root=checkout).out


def test_a_misspelling_of_it_is_recognised(checkout: Path) -> None:
    ended = autotune("probe", "m", "d", "--fix", "weight_decy=on", folder=checkout, root=checkout)
    assert ended.code == 2
    assert "Did you mean 'weight_decay'" in ended.err


@pytest.mark.slow
@pytest.mark.nightly
def test_it_is_searched_by_a_space_file_and_written_to_the_configuration(
    checkout: Path, small_model_directory: Path, small_dataset_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "space.yaml"
    file.write_text('techniques:\n  max_length: [coverage]\n  weight_decay: ["off", "on"]\n', encoding="utf-8")
    words = (
        "probe",
        small_model_directory,
        small_dataset_file,
        "--device",
        "cpu",
        "--effort",
        "quick",
        "--space",
        file,
    )
    ended = autotune(*words, "--trials", "4", "--json", "--output", "out", folder=tmp_path, root=checkout)
    assert ended.code == 0, ended.err
    probed = [trial["candidate"]["weight_decay"] for trial in ended.document["trials"]]
    assert {"off", "on"} <= set(probed)
    assert "weight_decay" in yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
