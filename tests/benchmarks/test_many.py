"""The page of plans against null GPUs matches its data."""

from __future__ import annotations

from benchmarks.common import read_rows
from benchmarks.plan.many import EACH, FOLDER, PLANS, page


def test_the_page_is_that_of_the_data() -> None:
    assert FOLDER.joinpath("many.md").read_text(encoding="utf-8") == page(read_rows(FOLDER / "many.jsonl"))


def test_the_plans_are_of_all_trainers_and_of_enough_candidates() -> None:
    assert {each.trainer for each in PLANS} == {"sft", "dpo", "kto", "reward", "grpo", "rloo", "online_dpo"}
    assert len({each.name for each in PLANS}) == len(PLANS)
    assert EACH * len(PLANS) >= 120
    assert {each.processes for each in PLANS} == {1, 2}
