"""Removed keys of a file are replaced, deprecated ones are told, and all else stays (``--fix-legacy``)."""

from __future__ import annotations

from pathlib import Path

import yaml

from autotune.app.check.fix import fix_legacy
from autotune.core.documents.verdict import Severity


def test_legacy_keys_are_rewritten_and_all_else_stays(tmp_path: Path) -> None:
    file, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    file.write_text("# mine\nmax_seq_length: 64  # tokens\nmax_steps: 3\nnum_mini_batches: 2\n", encoding="utf-8")
    fixed = fix_legacy(str(file), trainer="sft", output=str(new))
    assert new.read_text(encoding="utf-8") == "# mine\nmax_length: 64  # tokens\nmax_steps: 3\nnum_mini_batches: 2\n"
    assert fixed.left == ()
    old = fix_legacy(str(file), trainer="rloo", output=str(tmp_path / "rloo.yaml"))
    assert [(item.key, item.line, item.severity) for item in old.left] == [("num_mini_batches", 4, Severity.SILENT)]


def test_a_deprecated_key_is_told_and_is_no_removed_key(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("use_liger: true\nuse_liger_kernel: true\n", encoding="utf-8")
    assert not fix_legacy(str(file), trainer="dpo").is_done
    file.write_text("use_liger: true\n", encoding="utf-8")
    assert fix_legacy(str(file), trainer="dpo").is_done
    assert yaml.safe_load(file.read_text(encoding="utf-8")) == {"use_liger_kernel": True}
    fixed = fix_legacy(str(file), trainer="dpo")
    assert [(item.key, item.severity) for item in fixed.left] == [("use_liger_kernel", Severity.NOTE)]
    assert fixed.is_done


def test_a_file_that_has_the_new_key_already_is_left_to_its_author(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    text = "max_seq_length: 64\nmax_length: 32\npacking: true\n"
    file.write_text(text, encoding="utf-8")
    fixed = fix_legacy(str(file), trainer="sft")
    assert "has max_length already" in fixed.left[0].message
    assert file.read_text(encoding="utf-8") == text


def test_two_legacy_keys_become_one_mapping(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("dispatch_batches: true\nmax_seq_length: 64\nsplit_batches: false\n", encoding="utf-8")
    assert fix_legacy(str(file), trainer="sft").left == ()
    new = {"accelerator_config": {"dispatch_batches": True, "split_batches": False}, "max_length": 64}
    assert yaml.safe_load(file.read_text(encoding="utf-8")) == new
