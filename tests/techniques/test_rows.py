"""The rules for cut, packed and concatenated rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.rows.documents import Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.setting import GLOBAL_BATCH, Base
from autotune.core.workload import Workload
from autotune.techniques import find
from autotune.trainers import trainers
from tests.settings import GPU, LENGTHS, contaminates, separates, setting, workload
from tests.techniques.test_rules import COVERING, SFT, candidate, evaluated


def test_symbolic_lengths_become_tokens() -> None:
    here = setting()
    technique = next(item for item in SFT.techniques if item.name == "max_length")
    assert technique.parse("coverage", here) == COVERING
    assert technique.parse("coverage*2", here) == 3776
    assert technique.parse("longest", here) == 2000


def test_a_length_that_drops_too_much_is_illegal() -> None:
    here = setting()
    assert "91.5 %" in str(SFT.illegal(candidate(here, max_length=1024), here))


def test_a_length_that_drops_rows_says_how_many_it_keeps() -> None:
    reward, here = trainers()["reward"], setting(of=pairs_kept_whole())
    start = reward.defaults(here)
    reason = str(reward.illegal(start.but(max_length=999), here))
    assert "keeps 50.7 % of the dataset's tokens and 90.0 % of its rows" in reason
    assert reward.illegal(start.but(max_length=1000), here) is None


def test_a_length_that_drops_every_row_is_illegal_whatever_was_asked_for() -> None:
    reward, here = trainers()["reward"], setting(of=pairs_kept_whole(), token_coverage=0.0)
    start = reward.defaults(here)
    assert "leaves none of the dataset's 100 rows" in str(reward.illegal(start.but(max_length=99), here))
    assert reward.illegal(start.but(max_length=100), here) is None


@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_a_length_that_cuts_too_much_of_the_answers_is_illegal(packing: str) -> None:
    plain = workload()
    answered = Documents.of_rows([[501, 600]] * 100, ordered=False, trained=[100] * 100)
    of = replace(plain, dataset=replace(plain.dataset, several=answered, lengths=LengthDistribution({600: 100})))
    here = setting(of=of, allowed=frozenset({GLOBAL_BATCH}))
    reason = str(SFT.illegal(candidate(here, max_length=594, packing=packing), here))
    assert "keeps 99.0 % of the dataset's tokens, but may keep only 94.0 % of those that the loss counts" in reason
    assert SFT.illegal(candidate(here, max_length=599, packing=packing), here) is None


@pytest.mark.parametrize(("packing", "length"), [("none", 600), ("bfd", 4096), ("wrapped", 600)])
def test_rows_are_no_longer_than_the_positions_that_a_model_embeds(packing: str, length: int) -> None:
    of = workload(lengths={512: 90, 513: 10} if packing == "bfd" else {600: 100})
    allowed = frozenset({"packing", GLOBAL_BATCH})
    here = setting(of=replace(of, model=replace(of.model, max_positions=512)), allowed=allowed, token_coverage=0.5)
    assert SFT.illegal(candidate(here, max_length=length, packing=packing), here) is None
    here = replace(here, workload=replace(of, model=replace(here.workload.model, embeds_positions=True)))
    assert "the model embeds 512 positions" in str(
        SFT.illegal(candidate(here, max_length=length, packing=packing), here)
    )
    assert SFT.illegal(candidate(here, max_length=512, packing=packing), here) is None


def test_wrapped_rows_drop_nothing_at_any_length() -> None:
    here = setting(allowed=frozenset({"packing", GLOBAL_BATCH}))
    assert SFT.illegal(candidate(here, packing="wrapped", max_length=512), here) is None


@pytest.mark.parametrize("choice", ["bfd_split", "wrapped"])
def test_packing_that_changes_training_has_to_be_allowed(choice: str) -> None:
    here = setting()
    assert "--allow packing" in str(SFT.illegal(candidate(here, packing=choice), here))
    allowed = setting(allowed=frozenset({"packing", GLOBAL_BATCH}))
    assert SFT.illegal(candidate(allowed, packing=choice), allowed) is None


def test_bfd_split_is_bfd_where_no_document_overflows() -> None:
    here = setting()
    assert candidate(here, packing="bfd_split", max_length=2000)["packing"] == "bfd"
    assert candidate(here, packing="bfd_split", max_length=1999)["packing"] == "bfd_split"


def test_bfd_split_is_not_bfd_where_a_document_to_evaluate_on_overflows() -> None:
    here = setting(of=evaluated({2000: 10}, {2500: 10}))
    assert candidate(here, packing="bfd_split", max_length=2000)["packing"] == "bfd_split"


def test_padding_free_is_part_of_bfd() -> None:
    here = setting()
    assert candidate(here, packing="bfd", padding_free="on") == candidate(here, packing="bfd", padding_free="off")


def test_padding_free_rows_are_cut_beforehand_since_trl_refuses_a_length() -> None:
    here = setting()
    plan = SFT.plan(candidate(here, padding_free="on"), here)
    assert plan.args["max_length"] is None
    assert plan.truncate_to == COVERING


def test_padding_free_rows_that_nothing_is_cut_from_stay_as_they_are() -> None:
    here = setting()
    plan = SFT.plan(candidate(here, padding_free="on", max_length=2000), here)
    assert (plan.args["max_length"], plan.truncate_to) == (None, None)


def test_a_length_beyond_the_longest_row_is_the_longest_row_unless_rows_are_packed() -> None:
    here = setting()
    assert candidate(here, max_length=4096)["max_length"] == 2000
    assert candidate(here, max_length=4096, packing="bfd")["max_length"] == 4096


def test_padding_free_needs_two_rows() -> None:
    here = setting()
    assert "no padding to remove" in str(
        SFT.illegal(candidate(here, padding_free="on", per_device_train_batch_size=1), here)
    )


@pytest.mark.parametrize("choices", [{"packing": "bfd"}, {"packing": "bfd_split"}, {"padding_free": "on"}])
def test_documents_share_rows_only_where_the_self_test_was_passed(choices: dict[str, str]) -> None:
    here = setting(
        of=workload(checks=(separates("eager"), contaminates("sdpa"))), allowed=frozenset({"packing", GLOBAL_BATCH})
    )
    assert "attend to each other" in str(SFT.illegal(candidate(here, attention="sdpa", **choices), here))
    assert SFT.illegal(candidate(here, attention="eager", **choices), here) is None
    assert "not checked" in str(SFT.illegal(candidate(setting(machine=GPU, of=here.workload, allowed=here.allowed),
                                                      attention="flash_attention_2", **choices),
                                            setting(machine=GPU, of=here.workload, allowed=here.allowed)))  # fmt: skip


def test_rows_to_evaluate_on_are_cut_no_more_than_those_to_train_on() -> None:
    of = workload(lengths={20: 50})
    longer = replace(of.dataset, lengths=LengthDistribution({20: 50, 400: 50}))
    here = setting(of=replace(of, evaluation=longer, evaluation_source=of.dataset_source))
    knob = find("max_length", SFT.techniques)
    assert knob.parse("coverage", setting(of=of)) == 24
    assert int(knob.parse("coverage", here)) >= 396
    assert knob.parse("longest", here) == 400
    assert "keeps 9.8 % of the evaluation's tokens" in str(SFT.illegal(candidate(here, max_length=21), here))


def test_rows_to_evaluate_on_are_not_packed_without_a_length() -> None:
    base = Base("mine.yaml", {}, entries={"args.eval_packing": True})
    for of, reason in ((workload(), None), (evaluated(LENGTHS, LENGTHS), "eval_packing needs a max_length")):
        here = replace(setting(of=of), base=base)
        found = SFT.illegal(candidate(here, padding_free="on", max_length=2000), here)
        assert found is None if reason is None else reason in str(found)


def test_padding_free_rows_are_not_cut_at_another_end_than_the_user_s() -> None:
    here = replace(setting(), base=Base("mine.yaml", {}, entries={"args.truncation_mode": "keep_end"}))
    assert "are cut at their end" in str(SFT.illegal(candidate(here, padding_free="on", max_length=1999), here))
    for choices in ({"padding_free": "on", "max_length": 2000}, {"max_length": 1999}):
        assert SFT.illegal(candidate(here, **choices), here) is None


def test_padding_free_rows_that_are_packed_already_are_not_cut() -> None:
    plain = workload()
    columns = ("input_ids", "seq_lengths")
    here = setting(of=replace(plain, dataset=replace(plain.dataset, columns=columns)))
    reason = SFT.illegal(candidate(here, padding_free="on", max_length=1999), here)
    assert "without the seq_lengths that keep documents apart" in str(reason)
    for rows in (1, 8):
        whole = candidate(here, padding_free="on", max_length=2000, per_device_train_batch_size=rows)
        assert SFT.illegal(whole, here) is None


@pytest.mark.parametrize(
    ("own", "packing", "reason"), [("none", "bfd", True), ("none", "none", False), ("bfd", "none", True)]
)
def test_packed_rows_do_not_lose_another_end_than_the_user_s(own: str, packing: str, reason: bool) -> None:
    base = Base("mine.yaml", {"packing": own}, entries={"args.truncation_mode": "keep_end"})
    here = replace(setting(allowed=frozenset({GLOBAL_BATCH})), base=base)
    found = SFT.illegal(candidate(here, packing=packing, max_length=1999), here)
    assert ("keeps the end of rows longer than 1,999 tokens" in str(found)) is reason
    assert SFT.illegal(candidate(here, packing=packing, max_length=2000), here) is None


def pairs_kept_whole() -> Workload:
    """Return a workload of pairs for a trainer that drops those with a longer sequence than the maximum length."""
    documents = Documents.of_groups([(90, 100, 100, 20), (10, 1000, 50, 1000)])
    plain = workload()
    return replace(plain, trainer="reward", dataset=replace(plain.dataset, several=documents))
