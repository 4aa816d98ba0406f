"""Probes of GRPO and RLOO: generation batches, passes, the sample of micro-batches, and vLLM."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama import modeling_llama
from trl import GRPOTrainer, RLOOTrainer

import autotune
from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.measurement import Schedule
from autotune.core.plan import Completions, TrainingPlan
from autotune.core.rows.batch_geometry import Layout, Shape
from autotune.core.rows.documents import Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.status import ProbeStatus
from autotune.core.workload import Rollouts
from autotune.errors import InputError
from autotune.probing import JobServer, probe
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import TracedRows
from autotune.step.trainers import find_adapter
from autotune.step.trainers.base import Drawing
from autotune.step.trainers.prompts import COMPLETION_TOKENS, reward_function
from autotune.step.trainers.vllm import FixedCompletions, set_completion_tokens, with_random_weights
from autotune.trainers import find_trainer
from autotune.trainers.groups import OLD_PASS
from autotune.trainers.prompts import REFERENCE_PASS
from autotune.virtual import trace
from tests.small import VOCABULARY, long_tailed_texts, small_tokenizer, write_rows, write_small_model
from tests.step.requests import trained
from tests.trainers.prepared import Prepared, prepared_rows
from tests.virtual.models import config_of

SCHEDULE = Schedule(warmup_micro_batches=0, min_micro_batches=4, max_micro_batches=4, max_seconds=600.0)
TEXTS = long_tailed_texts(64, longest_words=40)
ROWS = [{"prompt": text, "answer": text[: place % 30]} for place, text in enumerate(TEXTS)]
MOST = 10


@pytest.fixture(scope="module")
def prompts(small_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepared_rows(find_trainer("grpo"), ROWS, small_model_directory, tmp_path_factory.mktemp("grpo"))


def request_of(found: Prepared, trainer: str = "grpo", **args: object) -> ProbeRequest:
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_completion_length": MOST}
    fixed = {"use_cpu": True, "bf16": False, "num_generations": 2}
    plan = TrainingPlan(
        trainer,
        {**fixed, **sizes, **args},
        rewards=("get_soft_overlong_punishment",),
        completions=Completions(mean=4.0, widest=4.0),
    )
    return found.request(plan, SCHEDULE)


@pytest.mark.parametrize(
    ("trainer", "args", "passes"),
    [
        ("grpo", {}, set()),
        ("grpo", {"steps_per_generation": 2}, set()),
        ("grpo", {"num_iterations": 2}, {"old log-probabilities"}),
        ("grpo", {"beta": 0.1}, {"reference log-probabilities"}),
        ("rloo", {"beta": 0.05}, {"old log-probabilities", "reference log-probabilities"}),
        ("rloo", {"beta": 0.0}, {"old log-probabilities"}),
    ],
)
def test_the_passes_over_a_generation_batch_are_those_of_a_whole_step(
    trainer: str, args: dict[str, object], passes: set[str], prompts: Prepared, tmp_path: Path
) -> None:
    # Only two of the four micro-batches of a step are run, which TRL must not notice.
    progress, _ = trained(request_of(prompts, trainer, **args), tmp_path)
    assert progress.peaks.keys() & {"old log-probabilities", "reference log-probabilities"} == passes
    assert all(
        generation.phases.keys() == {"generation", "scoring", *passes} for generation in progress.timed.generations
    )


@pytest.mark.parametrize("micro_batches", [2, 16])
def test_a_probe_generates_whole_generation_batches_and_runs_few_micro_batches_on_each(
    micro_batches: int, prompts: Prepared, tmp_path: Path
) -> None:
    request = request_of(prompts, "rloo", beta=0.05, gradient_accumulation_steps=micro_batches)
    progress, trainer = trained(request, tmp_path)
    batches, whole = progress.batches, progress.whole_step
    assert batches.step_micro_batches == 2
    # The data loader yields all rows of a generation batch, each prompt twice in succession.
    assert batches.order.shape[1] == 2 * micro_batches
    assert (batches.order[:, ::2] == batches.order[:, 1::2]).all()
    assert whole.generations == 1.0
    assert len(progress.timed.generations) == len(progress.timed.micro_batches) / 2
    assert trainer.args.gradient_accumulation_steps == 2


def test_continuous_batching_generates_as_many_tokens_as_are_timed(
    prompts: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token ends a completion of this model, so that each would have only one."""
    generate, made = GRPOTrainer._generate_single_turn, list[int]()

    def ending(self: Any, inputs: Any) -> Any:
        self.generation_config.eos_token_id = list(range(VOCABULARY))
        return score(self, inputs)

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = generate(self, *args, **kwargs)
        made.extend(map(len, found[0]))
        return found

    score = GRPOTrainer._generate_and_score_completions
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", ending)
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", noted)
    batched: dict[str, Any] = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 256},
    }
    trained(request_of(prompts, **batched), tmp_path)
    assert made
    assert min(made) >= 4


def test_passes_over_a_generation_batch_run_on_all_its_chunks(
    prompts: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, rows = RLOOTrainer._get_per_token_logps_and_entropies, set[int]()

    def watched(self: Any, model: Any, ids: Any, mask: Any, kept: int, size: int | None = None, **kwargs: Any) -> Any:
        if size is not None and not torch.is_grad_enabled():
            rows.add(len(ids))
        return compute(self, model, ids, mask, kept, size, **kwargs)

    monkeypatch.setattr(RLOOTrainer, "_get_per_token_logps_and_entropies", watched)
    trained(request_of(prompts, "rloo", beta=0.05, gradient_accumulation_steps=8), tmp_path)
    assert rows == {16}


def test_worst_completions_are_as_long_as_they_may_be_and_each_micro_batch_has_a_mask(
    prompts: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, bool]] = []
    compute = GRPOTrainer.compute_loss

    def watched(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mask = inputs["completion_mask"]
        seen.append((*mask.shape, bool(mask.all())))
        return compute(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "compute_loss", watched)
    trained(request_of(prompts, "grpo"), tmp_path)
    worst, typical = seen[:4], seen[-4:]
    assert {shape[:2] for shape in worst} == {(2, MOST)}
    assert not any(full for *_, full in worst)
    assert {shape[1] for shape in typical} == {4}


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_the_loss_counts_completions_where_trl_masks_those_that_do_not_end_by_themselves(
    trainer: str, prompts: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[list[int]] = []
    known = find_adapter(trainer).trainer
    compute = known.compute_loss

    def watched(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        counted.append(inputs["completion_mask"].sum(dim=1).tolist())
        return compute(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(known, "compute_loss", watched)
    trained(request_of(prompts, trainer, mask_truncated_completions=True), tmp_path)
    assert all(min(tokens) > 0 for tokens in counted)
    assert counted[0] == [MOST, MOST - 1]


@pytest.mark.parametrize(("together", "prompts", "copies", "shared"), [(1, 1, 4, 2), (3, 3, 4, 2), (4, 2, 8, 1)])
def test_as_many_rows_are_yielded_as_a_process_completes_though_its_completions_are_no_whole_groups(
    together: int, prompts: int, copies: int, shared: int
) -> None:
    sizes = {"per_device_train_batch_size": 4, "steps_per_generation": together}
    trainer = SimpleNamespace(args=SimpleNamespace(**sizes), num_generations=8, num_iterations=1)
    drawing = find_adapter("grpo").drawing(trainer)
    assert drawing == Drawing(prompts, copies, uses=together, shared=shared)
    assert drawing.rows * drawing.copies == 4 * together
    plan = TrainingPlan("grpo", {**sizes, "gradient_accumulation_steps": together, "num_generations": 8})
    assert find_trainer("grpo").rows_per_draw(plan) == prompts


def test_completions_are_as_long_as_one_another_where_no_row_is_to_be_padded(prompts: Prepared) -> None:
    trainer = SimpleNamespace(train_dataset=prompts.rows, plan=request_of(prompts).plan, max_completion_length=MOST)
    order, worst = np.array([[0, 0], [1, 1], [2, 2]]), np.array([False, True, True])
    longest = np.array([[False, False], [True, False], [True, True]])
    for given, last in ((None, MOST - 1), (longest, MOST)):
        found = find_adapter("grpo").select_batches(trainer, order, worst, given)
        assert found[COMPLETION_TOKENS][:] == [[4], [4], [MOST], [MOST - 1], [MOST], [last]]


def test_rows_are_not_copied_as_often_as_they_are_yielded(prompts: Prepared, tmp_path: Path) -> None:
    request = request_of(prompts)
    folder = Path(request.tokenized_directory)
    before = {file for file in folder.iterdir() if not file.name.startswith("cache-")}
    _, trainer = trained(request, tmp_path)
    assert {Path(file["filename"]) for file in trainer.train_dataset.cache_files} <= before == set(folder.iterdir())


def test_typical_completions_are_as_long_as_a_column_says(small_model_directory: Path, tmp_path: Path) -> None:
    rollouts = Rollouts(column="answer")
    found = prepared_rows(find_trainer("grpo"), ROWS, small_model_directory, tmp_path, rollouts=rollouts)
    lengths = found.reply.dataset.completions
    assert lengths is not None
    assert lengths.rows == len(TEXTS)
    progress, trainer = trained(request_of(found), tmp_path)
    is_worst = np.repeat(progress.batches.is_worst, progress.batches.order.shape[1])
    wanted = np.array(trainer.train_dataset[COMPLETION_TOKENS])[:, 0]
    assert 1 <= wanted[~is_worst].min() < wanted[~is_worst].mean() < wanted[~is_worst].max() <= MOST
    assert wanted[is_worst].min() == MOST - 1


def test_a_probe_out_of_memory_names_the_generation(job_server: JobServer, prompts: Prepared, tmp_path: Path) -> None:
    request = request_of(
        prompts, per_device_train_batch_size=1, gradient_accumulation_steps=128, max_completion_length=400
    )
    # Generating all completions at once needs 58 MiB, training on one of them at a time 23 MiB.
    request = replace(request, limit_bytes=24 * 2**20)
    ended = probe(job_server, request, tmp_path / "probe", timeout_seconds=240)
    assert ended.status is ProbeStatus.OUT_OF_MEMORY
    assert ended.out_of_memory is not None
    assert ended.out_of_memory.phase == "generation"


def test_a_reward_function_that_is_not_there_is_told_by_name() -> None:
    assert reward_function("think_format_reward").__name__ == "think_format_reward"
    with pytest.raises(InputError, match="There is no reward function 'sorting'"):
        reward_function("sorting")
    with pytest.raises(InputError, match="json has no function sorting"):
        reward_function("json.sorting")


@pytest.mark.parametrize("once", [True, False])
def test_a_traced_pass_over_a_generation_batch_runs_one_of_the_chunks_that_the_geometry_counts(once: bool) -> None:
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_completion_length": MOST}
    args = {**sizes, "bf16": False, "num_generations": 2, "beta": 0.05}
    assumed = Completions(mean=4.0, widest=4.0)
    plan = TrainingPlan("rloo", args, rewards=("get_soft_overlong_punishment",), completions=assumed)
    known = find_trainer("rloo")
    geometry = known.geometry(plan, Documents.of_lengths(LengthDistribution({20: 8})))
    assert {phase.phase: phase.per_step for phase in geometry.phases}[OLD_PASS] == 4
    traced_plan = known.traced_plan(plan, geometry.layout, geometry.worst)
    rows = TracedRows(known.traced_rows(geometry.layout, geometry.worst, 1.0), once=once)
    run = traced_training(traced_plan, config_of("llama", num_hidden_layers=1), small_tokenizer(), rows)
    traced = trace(run, target="cuda", capability=(8, 0))
    for name in (OLD_PASS, REFERENCE_PASS):
        phase = next(phase for phase in traced.phases if phase.name == name)
        ran = traced.operators[phase.first_operator : phase.end_operator]
        assert sum("embedding" in operator.name for operator in ran) == 1


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("layout", [Layout.EQUAL, Layout.COMPLETED, Layout.PADDED])
def test_traced_rows_have_a_mask_where_prompts_or_completions_differ(
    layout: Layout, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL pads a row alone, too, to the longest prompt and the longest completion of its generation batch."""
    masked = dict[int, set[bool]]()
    create = modeling_llama.create_causal_mask

    def watched(**given: Any) -> Any:
        mask = given["attention_mask"]
        masked.setdefault(given["inputs_embeds"].shape[1], set()).add(mask is not None and not mask.all())
        return create(**given)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", watched)
    args = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 4, "max_completion_length": MOST}
    assumed = Completions(mean=4.0, widest=4.0)
    further = {"bf16": False, "num_generations": 2, "beta": 0.05}
    plan = TrainingPlan("rloo", {**args, **further}, completions=assumed)
    known, shape = find_trainer("rloo"), Shape(rows, 30, MOST)
    made = TracedRows(known.traced_rows(layout, shape, 1.0), once=True)
    of_plan = known.traced_plan(plan, layout, shape)
    trace(traced_training(of_plan, config_of("llama", num_hidden_layers=1), small_tokenizer(), made), target="cpu")
    # Passes over prompts and completions, and the first one of the generation.
    assert masked[30] == {layout is not Layout.EQUAL}
    assert masked[30 - MOST] == {layout is Layout.PADDED}


def test_vllm_generates_as_many_tokens_as_a_probe_wants() -> None:
    generation = SimpleNamespace(max_completion_length=16, generation_kwargs={"seed": 1})
    set_completion_tokens(generation, 40)
    assert generation.max_completion_length == 40
    assert generation.generation_kwargs == {"seed": 1, "min_tokens": 40, "ignore_eos": True}


def test_what_stands_for_vllm_gives_completions_of_that_length() -> None:
    state = SimpleNamespace(deepspeed_plugin=None)
    accelerator = SimpleNamespace(device=torch.device("cpu"), state=state)
    given = FixedCompletions(model=None, accelerator=accelerator)
    set_completion_tokens(given, 3)
    prompts, completions, probabilities, _ = given.generate([[1, 2], [1]], num_generations=2)
    assert prompts == [[1, 2], [1]]
    assert [len(ids) for ids in completions] == [3, 3]
    assert [len(row) for row in probabilities] == [3, 3]
    assert all(len(token) == 1 for row in probabilities for token in row)


def test_vllm_starts_without_reading_weights() -> None:
    module: Any = ModuleType("trl.generation.vllm_generation")
    module.LLM = lambda **given: given
    with with_random_weights(module):
        assert module.LLM(model="x") == {"model": "x", "load_format": "dummy"}
    assert module.LLM(model="x") == {"model": "x"}
    with with_random_weights(ModuleType("without vllm")):
        pass


def test_on_a_virtual_device_no_vllm_starts_and_no_server_is_asked() -> None:
    module: Any = ModuleType("trl.generation.vllm_generation")
    module.LLM = module.VLLMClient = None

    def run(device: torch.device) -> None:
        with with_random_weights(module):
            module.LLM(model="x").sleep(level=2)
            info = module.VLLMClient(base_url="x").get_server_info()
            assert info["model_config"]["logprobs_mode"] == "processed_logprobs"

    trace(run, target="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm 0.22 to 0.31, which is not installed")
@pytest.mark.parametrize("vllm", ["colocate", "colocate-sleep"])
def test_a_probe_with_vllm_measures_both(vllm: str, tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=4, hidden_size=256)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"token {number} of"} for number in range(64)])
    found = autotune.probe(
        str(model), str(rows), trainer="grpo", device="cuda", trials=2, output=tmp_path / "out",
        fix={"vllm": vllm, "vllm_gpu_memory_utilization": "0.3", "max_completion_length": 32},
    )  # fmt: skip
    assert found.recommended is not None
