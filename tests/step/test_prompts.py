"""Prompts of trainers that generate: the longest are dropped once, and the widest evaluated ones are completed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset, load_from_disk
from trl.trainer.utils import is_async_callable

from autotune.app.notes import notes_on_prompts
from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.plan import TrainingPlan
from autotune.core.program import EVALUATE
from autotune.core.rows.batch_geometry import Layout, Shape
from autotune.core.setting import Setting
from autotune.core.status import ProbeStatus
from autotune.core.workload import NO_DATA, DroppedRows, Rollouts, Workload
from autotune.emit.rows import write_rows
from autotune.errors import InputError
from autotune.step.job import JobContext
from autotune.step.jobs.prepare import prepare
from autotune.step.jobs.probe import classify_error
from autotune.step.trainers import find_adapter
from autotune.step.trainers.prompts import RewardArguments, RewardError, check_arguments, reward_function
from autotune.trainers import find_trainer
from autotune.trainers.evaluation import whole_geometry
from autotune.trainers.problem import TrainerProblem
from autotune.trainers.prompts import NO_REWARD
from tests.settings import CPU, problem
from tests.small import small_tokenizer
from tests.step.requests import BRIEF, probed_here
from tests.trainers.prepared import Prepared, prepared_rows
from tests.trainers.samples import Rows

WORDS = [3, 40, 4, 5, 60, 6, 7, 8, 9, 40]
"""Words of each prompt: one in ten is the longest, and two share the next length."""


def rows_of(words: list[int]) -> list[dict[str, Any]]:
    return [
        {"prompt": " ".join(["memory"] * count), "solution": place, "source": {"name": f"book {place}"}}
        for place, count in enumerate(words)
    ]


def tokens_of(words: int) -> int:
    """Return the tokens of a prompt, by the tokenizer alone."""
    return len(small_tokenizer()(" ".join(["memory"] * words))["input_ids"])


def test_a_module_of_rewards_that_exits_is_told_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exiting_rewards.py").write_text("import sys\nsys.exit('no key')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=r"exiting_rewards.length cannot be imported: no key"):
        reward_function("exiting_rewards.length")


JUDGES = """
import functools
def judge(prompts, completions, answer, weight=1.0, trainer_state=None, log_metric=None, **others):
    return [float(len(each) > 1) for each in answer]
def whole(prompt, completions, **others):
    return [0.0] * len(completions)
def bare(completions, *, answer):
    return [0.0] * len(completions)
def failing(completions, **others):
    raise RuntimeError("the endpoint returned 503")
async def waiting(completions, **others):
    raise RuntimeError("the endpoint returned 429")
class Scorer:
    def __call__(self, completions, **others):
        return [0.5] * len(completions)
scorer = Scorer()
class Waiting:
    async def __call__(self, completions, **others):
        return [0.5] * len(completions)
settled = functools.partial(Waiting(), scale=2.0)
"""


@pytest.fixture
def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of reward functions."""
    (tmp_path / "judging_rewards.py").write_text(JUDGES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "judging_rewards"


def check_called(name: str, columns: list[str]) -> None:
    check_arguments(name, RewardArguments().of(columns), columns)


def test_a_reward_function_needs_the_columns_that_trl_passes_to_it(judges: str) -> None:
    check_called(f"{judges}.judge", ["prompt", "answer", "source"])
    check_called("get_soft_overlong_punishment", ["prompt"])
    with pytest.raises(InputError, match=r"judge .* needs answer, and TRL has no column .* the dataset has prompt, s"):
        check_called(f"{judges}.judge", ["prompt", "source"])
    # TRL passes the prompts of a batch under another name.
    with pytest.raises(InputError, match=r"whole .* needs prompt, and TRL has no column of that name to pass"):
        check_called(f"{judges}.whole", ["prompt"])
    with pytest.raises(InputError, match=r"accuracy_reward .* needs solution"):
        check_called("accuracy_reward", ["prompt", "answer"])


def test_a_reward_function_takes_all_that_trl_passes_to_it(judges: str) -> None:
    said = r"bare .* take prompts, completion_ids, .*, log_metric, source, which"
    with pytest.raises(InputError, match=said) as told:
        check_called(f"{judges}.bare", ["prompt", "answer", "source"])
    assert told.value.hint == "Add **kwargs to its parameters."


def test_rows_that_stand_in_for_data_lack_no_column(judges: str, small_model_directory: Path, tmp_path: Path) -> None:
    rollouts = Rollouts(rewards=(f"{judges}.judge",))
    asked = prepared_rows(find_trainer("grpo"), rows_of(WORDS), small_model_directory, tmp_path / "rows").asked
    with pytest.raises(InputError, match=r"judge .* needs answer"):
        prepare(replace(asked, rollouts=rollouts), JobContext(tmp_path, 0.0))
    without = replace(asked, rollouts=rollouts, dataset=replace(asked.dataset, name=NO_DATA))
    assert prepare(without, JobContext(tmp_path, 0.0)).dataset.documents.rows == len(WORDS)


def test_a_reward_function_of_messages_needs_prompts_that_are_messages(
    small_model_directory: Path, tmp_path: Path
) -> None:
    rollouts = Rollouts(rewards=("think_format_reward",))
    messages = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows_of(WORDS)]
    for rows, refused in ((rows_of(WORDS), True), (messages, False)):
        asked = prepared_rows(find_trainer("grpo"), rows, small_model_directory, tmp_path / f"{refused}").asked
        with pytest.raises(InputError, match=r"think_format_reward .* reads messages") if refused else nullcontext():
            prepare(replace(asked, rollouts=rollouts), JobContext(tmp_path, 0.0))


def test_an_error_of_the_user_s_own_reward_function_names_it(judges: str) -> None:
    names = [f"{judges}.{name}" for name in ("failing", "waiting", "scorer", "settled")]
    plan = TrainingPlan("grpo", {}, rewards=(*names, "accuracy_reward"))
    failing, waiting, scorer, settled, own = find_adapter("grpo").arguments(plan)["reward_funcs"]
    with pytest.raises(RewardError) as raised:
        failing(completions=["a"])
    reason = classify_error(raised.value, began_training=False, device="cpu").reason
    assert reason == f"Your reward function {judges}.failing failed: RuntimeError: the endpoint returned 503"
    with pytest.raises(RewardError, match=r"judging_rewards.waiting failed: RuntimeError: the endpoint returned 429"):
        asyncio.run(waiting(completions=["a"]))
    assert [is_async_callable(each) for each in (failing, waiting, scorer, settled)] == [False, True, False, True]
    assert scorer(completions=["a"], source=["b"]) == [0.5]
    assert own is reward_function("accuracy_reward")


def test_a_trace_calls_no_reward_function_of_the_user_s_own() -> None:
    args = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "num_generations": 2}
    for trainer, sizes in (("grpo", {"max_completion_length": 8}), ("online_dpo", {"max_new_tokens": 8})):
        rewards = ("judging_rewards.judge", "accuracy_reward")
        plan = TrainingPlan(trainer, {**args, **sizes, "max_length": 16}, rewards=rewards)
        traced = find_trainer(trainer).traced_plan(plan, Layout.EQUAL, Shape(2, 16, 8))
        assert traced.rewards == (NO_REWARD, NO_REWARD)


def to_cover(
    folder: Path, model: Path, share: float, trainer: str = "grpo", evaluated: list[int] | None = None
) -> Prepared:
    """Prepare the rows, of which so large a share is to be kept."""
    rollouts, beside = Rollouts(prompt_coverage=share), rows_of(evaluated) if evaluated else None
    return prepared_rows(find_trainer(trainer), rows_of(WORDS), model, folder, evaluated=beside, rollouts=rollouts)


def problem_on(workload: Workload) -> TrainerProblem:
    return problem(Setting(workload, CPU, 8, 1.0), trainer=workload.trainer)


@pytest.mark.parametrize(
    ("share", "kept", "dropped"),
    [
        (1.0, range(10), []),
        (0.95, range(10), []),
        (0.9, [0, 1, 2, 3, 5, 6, 7, 8, 9], [5]),
        # Two prompts are equally long: both are kept where one is needed, and dropped where none is.
        (0.8, [0, 1, 2, 3, 5, 6, 7, 8, 9], [5]),
        (0.7, [0, 2, 3, 5, 6, 7, 8], [5, 2, 10]),
    ],
)
def test_the_longest_prompts_are_dropped_and_told_by_row(
    share: float, kept: list[int], dropped: list[int], small_model_directory: Path, tmp_path: Path
) -> None:
    reply = to_cover(tmp_path, small_model_directory, share).reply
    rows = load_from_disk(reply.dataset.tokenized_directory)
    assert rows["solution"] == list(kept)
    assert reply.dataset.lengths.rows == len(rows)
    longest = max(WORDS[place] for place in kept)
    expected = DroppedRows(
        len(dropped), tokens_of(longest), tuple((number, tokens_of(WORDS[number - 1])) for number in dropped)
    )
    assert reply.dataset.dropped == (expected if dropped else None)


@pytest.mark.parametrize("trainer", ["grpo", "rloo", "online_dpo"])
def test_the_worst_micro_batch_is_that_of_the_prompts_that_are_kept(
    trainer: str, small_model_directory: Path, tmp_path: Path
) -> None:
    known = find_trainer(trainer)
    widths, fingerprints = [], set()
    for share in (1.0, 0.7):
        workload = to_cover(tmp_path / str(share), small_model_directory, share, trainer).workload
        of = problem_on(workload)
        plan = known.plan(of.baseline, of.setting)
        (generation,) = (
            item for item in known.geometry(plan, workload.dataset.documents).phases if item.phase == "generation"
        )
        widths.append(generation.worst.tokens - generation.worst.generated)
        fingerprints.add(workload.dataset.fingerprint)
    assert widths == [tokens_of(60), tokens_of(9)]
    assert len(fingerprints) == 2


@pytest.mark.parametrize("evaluated", [None, [4, 50, *([5] * 8)]], ids=["trained", "evaluated"])
def test_the_bundle_has_the_rows_that_are_kept_as_the_user_wrote_them(
    evaluated: list[int] | None, small_model_directory: Path, tmp_path: Path
) -> None:
    workload = to_cover(tmp_path, small_model_directory, 0.9, evaluated=evaluated).workload
    of = problem_on(workload)
    plan = of.trainer.plan(of.baseline, of.setting)
    rows = write_rows(workload, plan, tmp_path / "bundle")
    assert not rows.cut
    kept = [row for row in rows_of(WORDS) if row["solution"] != 4]
    assert load_dataset(**rows.entry(rows.split)).to_list() == kept
    if evaluated is None:
        assert rows.place == str(tmp_path / "bundle" / "rows.parquet")
        return
    assert rows.evaluated is not None
    assert load_dataset(**rows.entry(rows.evaluated)).to_list() == [
        row for row in rows_of(evaluated) if row["solution"] != 1
    ]
    assert [note.partition(":")[0] for note in notes_on_prompts(workload)] == [
        f"--prompt-coverage 0.9 drops 1 of the 10 prompts of {name}, over {tokens_of(words)} tokens"
        for name, words in (("rows.jsonl", 40), ("evaluated.jsonl", 5))
    ]
    assert workload.dataset.dropped is not None


def test_a_note_says_that_nothing_was_dropped(small_model_directory: Path, tmp_path: Path) -> None:
    workload = to_cover(tmp_path, small_model_directory, 0.99).workload
    (note,) = notes_on_prompts(workload)
    assert note.startswith("--prompt-coverage 0.99 drops none of the 10 prompts of rows.jsonl")


def test_two_prompts_at_least_are_left(small_model_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--prompt-coverage 0.01 keeps 1 of the 10 prompts of rows\.jsonl"):
        to_cover(tmp_path, small_model_directory, 0.01)


TRAINED, EVALUATED = [4, 9, 6, 12, 7, 5, 10, 8], [5, 40, 7]
"""Words of prompts."""
SIZES = {"max_completion_length": 8, "num_generations": 2, "per_device_train_batch_size": 2}
GENERATING = pytest.mark.parametrize("trainer", ["grpo", "rloo"])
BY_DAY = pytest.mark.parametrize("trainer", ["grpo", pytest.param("rloo", marks=pytest.mark.nightly)])
ToEvaluate = Callable[[str], Prepared]


def prompts(words: list[int]) -> Rows:
    return [{"prompt": " ".join(["memory"] * count)} for count in words]


@pytest.fixture(scope="module")
def to_evaluate(small_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> ToEvaluate:
    """A function that returns prompts for a trainer to train on, and longer ones to evaluate on, prepared once."""

    @cache
    def of(trainer: str) -> Prepared:
        known, folder = find_trainer(trainer), tmp_path_factory.mktemp(trainer)
        return prepared_rows(known, prompts(TRAINED), small_model_directory, folder, evaluated=prompts(EVALUATED))

    return of


def request_of(found: Prepared, **choices: int) -> ProbeRequest:
    allowed = frozenset(choices) | frozenset(SIZES)
    of = problem(Setting(found.workload, CPU, 4, 1.0, allowed), trainer=found.trainer.name)
    candidate = of.trainer.normal(of.baseline.but(**{**SIZES, **choices}), of.setting)
    assert of.trainer.illegal(candidate, of.setting) is None
    return found.request(of.trainer.plan(candidate, of.setting), BRIEF)


@GENERATING
def test_the_widest_prompts_are_completed_in_an_evaluation_of_the_size_that_is_planned(
    trainer: str, to_evaluate: ToEvaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = to_evaluate(trainer)
    request = request_of(found, per_device_eval_batch_size=4)
    trained: list[int] = []
    evaluated: list[tuple[int, int]] = []
    whole = find_adapter(trainer).trainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        widths = [inputs[name].shape[1] for name in ("prompt_ids", "completion_ids")]
        if self.model.training:
            trained.append(sum(widths))
        else:
            evaluated.append((len(inputs["prompt_ids"]), sum(widths)))
        return whole(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(find_adapter(trainer).trainer, "compute_loss", compute_loss)
    shown = probed_here(request, tmp_path)
    assert (shown.status, shown.reason) == (ProbeStatus.OK, "")
    assert EVALUATE in shown.peaks
    assert shown.evaluation_seconds is not None
    geometry = whole_geometry(find_trainer(trainer), request.plan, found.workload).evaluation
    assert geometry is not None
    # The longest completions of the widest prompts come first.
    assert Shape(*evaluated[0], SIZES["max_completion_length"]) == geometry.worst
    assert geometry.worst.tokens == max(tokens for _, tokens in evaluated) > max(trained)


@GENERATING
def test_no_evaluation_of_trl_s_loader_is_larger(trainer: str, to_evaluate: ToEvaluate, tmp_path: Path) -> None:
    found = to_evaluate(trainer)
    for rows, at_most in ((2, 2), (4, 4), (16, 6)):
        request = request_of(found, per_device_eval_batch_size=rows)
        # As TRL draws them: in random order, each prompt as often as it is completed.
        real = found.built(request.plan, tmp_path / str(rows))
        batches = list(real.get_eval_dataloader())
        geometry = whole_geometry(find_trainer(trainer), request.plan, found.workload).evaluation
        assert geometry is not None
        assert geometry.worst.rows == at_most == max(map(len, batches))
        drawn = max(len(row["prompt_ids"]) for batch in batches for row in batch)
        assert geometry.worst.tokens == drawn + SIZES["max_completion_length"]


@BY_DAY
@pytest.mark.parametrize(("copies", "rows", "at_most"), [(1, 1, 1), (1, 3, 3), (4, 4, 4), (4, 16, 12)])
def test_prompts_to_evaluate_on_are_completed_as_often_as_their_own_number_says(
    trainer: str, copies: int, rows: int, at_most: int, to_evaluate: ToEvaluate, tmp_path: Path
) -> None:
    found = to_evaluate(trainer)
    request = request_of(found, per_device_eval_batch_size=4)
    own = {"num_generations_eval": copies, "per_device_eval_batch_size": rows}
    request = replace(request, plan=replace(request.plan, args={**request.plan.args, **own}))
    real = found.built(request.plan, tmp_path / "built")
    batches = list(real.get_eval_dataloader())
    geometry = whole_geometry(find_trainer(trainer), request.plan, found.workload).evaluation
    assert geometry is not None
    assert geometry.worst.rows == at_most == max(map(len, batches))


def test_a_probe_evaluates_with_as_many_completions_as_the_plan_says(
    to_evaluate: ToEvaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = to_evaluate("grpo")
    request = request_of(found, per_device_eval_batch_size=4)
    own = {"num_generations_eval": 1, "per_device_eval_batch_size": 3}
    request = replace(request, plan=replace(request.plan, args={**request.plan.args, **own}))
    evaluated: list[int] = []
    whole = find_adapter("grpo").trainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.model.training:
            evaluated.append(len(inputs["prompt_ids"]))
        return whole(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(find_adapter("grpo").trainer, "compute_loss", compute_loss)
    shown = probed_here(request, tmp_path)
    assert (shown.status, shown.reason, EVALUATE in shown.peaks) == (ProbeStatus.OK, "", True)
    assert set(evaluated) == {len(EVALUATED)}


@BY_DAY
@pytest.mark.parametrize("rows", [3, 4])
def test_evaluated_completions_form_whole_groups_as_trl_demands(
    trainer: str, rows: int, to_evaluate: ToEvaluate, tmp_path: Path
) -> None:
    found = to_evaluate(trainer)
    allowed = frozenset(SIZES)
    of = problem(Setting(found.workload, CPU, 4, 1.0, allowed), trainer=trainer)
    candidate = of.trainer.normal(of.baseline.but(**SIZES, per_device_eval_batch_size=rows), of.setting)
    args = of.trainer.plan(candidate, of.setting).args

    def configure() -> None:
        find_adapter(trainer).config(**{**args, "output_dir": str(tmp_path), "bf16": False, "model_init_kwargs": None})

    if rows == 4:
        assert of.trainer.illegal(candidate, of.setting) is None
        configure()
        return
    assert of.trainer.illegal(candidate, of.setting) == (
        "an evaluation batch of 3 completions (per_device_eval_batch_size) cannot be divided into groups of the 2 "
        "completions of one prompt (num_generations)"
    )
    with pytest.raises(ValueError, match="must be divisible by the number of generations used for evaluation"):
        configure()


def test_the_size_is_searched_where_there_are_prompts_to_evaluate_on(to_evaluate: ToEvaluate) -> None:
    found = to_evaluate("grpo")
    for of, sizes in ((found.workload, {4, 8, 16, 32, 64}), (replace(found.workload, evaluation=None), {8})):
        here = problem(Setting(of, CPU, 8, 1.0), trainer="grpo")
        assert set(here.choices.get("per_device_eval_batch_size", (8,))) == sizes
