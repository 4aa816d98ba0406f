"""Which changes of the code make traces be traced anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.planning.tracing.cache import digest_of


@pytest.mark.parametrize(
    "file", ["virtual/device.py", "virtual/kernels/flash.py", "step/jobs/trace.py", "core/plan.py"]
)
def test_a_change_anywhere_below_the_packages_of_a_trace_counts(tmp_path: Path, file: str) -> None:
    target = tmp_path / file
    target.parent.mkdir(parents=True)
    target.write_text("a = 1", encoding="utf-8")
    before = digest_of(tmp_path)
    target.write_text("a = 2", encoding="utf-8")
    assert digest_of(tmp_path) != before
    target.rename(target.with_name("other.py"))
    assert digest_of(tmp_path) != before
