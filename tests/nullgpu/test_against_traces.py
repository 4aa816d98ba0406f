"""What a plan traces for a candidate, held against what training it on a null GPU allocates."""

from __future__ import annotations

import pytest

from tests.nullgpu.machine import NEEDS_CUDA_BUILD, NullMachine

pytestmark = NEEDS_CUDA_BUILD

# One row of 1,000 tokens among rows of 500: the loss counts 2,500 of the 4,000 tokens of the worst micro-batch.
BOTH = """
    import json, sys, tempfile
    from pathlib import Path
    from benchmarks.nullgpu.cases import Case
    from benchmarks.nullgpu.record import Record
    from benchmarks.nullgpu.run import run
    if __name__ == "__main__":
        case = Case("sft", "llama", {1000: 1, 500: 7}, 4)
        with tempfile.TemporaryDirectory() as folder:
            record = Record(Path(folder, "record.jsonl"))
            run([case], record, {"measured": "now", "traced": "now"})
        print(json.dumps(record.rows[case.name]))
"""


def test_a_plan_counts_no_padding_that_the_loss_leaves_out(machine: NullMachine) -> None:
    found = machine.run(BOTH)
    assert found["traced"]["allocated"] == pytest.approx(found["measured"]["allocated"], rel=0.005)
    assert found["traced"]["reserved"] == pytest.approx(found["measured"]["reserved"], rel=0.05)
