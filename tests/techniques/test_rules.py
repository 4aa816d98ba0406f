"""The rules of single techniques: legal choices, equivalent choices, and entries of the plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autotune.core.candidate import Candidate, Choice
from autotune.core.plan import ALLOCATOR_VARIABLES
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.setting import Base, Setting
from autotune.core.workload import Workload
from autotune.errors import InputError
from autotune.techniques import find
from autotune.techniques.base import CrashReason
from autotune.trainers import trainers
from tests.settings import CPU, EIGHT, GPU, TWO, machine_with, problem, setting, workload

SFT = trainers()["sft"]
COVERING = 1888
"""The shortest length that keeps 99 % of the tokens of ``settings.LENGTHS``, rounded up to a multiple of 8."""


def candidate(here: Setting, **choices: Choice) -> Candidate:
    start = SFT.defaults(here).but(max_length=COVERING)
    return SFT.normal(start.but(**choices), here)


def test_trl_s_default_with_a_covering_length_is_legal() -> None:
    here = setting()
    assert SFT.illegal(candidate(here), here) is None


def test_micro_batches_have_to_add_up_to_the_global_batch() -> None:
    here = setting(global_batch_size=12)
    assert "do not divide the 12 documents" in str(SFT.illegal(candidate(here, per_device_train_batch_size=8), here))
    plan = SFT.plan(candidate(here, per_device_train_batch_size=4), here)
    assert plan.args["gradient_accumulation_steps"] == 3
    single = setting(global_batch_size=1)
    rule = "per_device_train_batch_size=8: a global batch has 1 row for each process"
    assert SFT.illegal(candidate(single, per_device_train_batch_size=8), single) == rule


@pytest.mark.parametrize(("rows", "expected"), [(8, 8), (64, 8), (12, 6), (7, 7), (11, 1), (1, 1)])
def test_the_baseline_has_trl_s_batch_or_the_largest_below_that_adds_up(rows: int, expected: int) -> None:
    assert candidate(setting(global_batch_size=rows))["per_device_train_batch_size"] == expected


@pytest.mark.parametrize(
    ("sharding", "rows", "choice"), [("fsdp2", 2, "on"), ("fsdp2", 4, "off"), ("ddp", 2, "off"), ("zero2", 2, "off")]
)
def test_gradients_are_summed_in_each_micro_batch_only_where_fsdp2_accumulates(
    sharding: str, rows: int, choice: str
) -> None:
    here = setting(machine=TWO)
    found = candidate(here, sharding=sharding, per_device_train_batch_size=rows, sync_each_batch="on")
    assert found["sync_each_batch"] == choice
    assert ("accelerator_config" in SFT.plan(found, here).args) == (choice == "on")


def test_quantised_weights_cannot_be_trained_without_adapters() -> None:
    here = setting(allowed=frozenset({"quantization", "lora"}))
    assert "it needs lora or peft_config" in str(SFT.illegal(candidate(here, quantization="4bit-nf4"), here))
    assert SFT.illegal(candidate(here, quantization="4bit-nf4", lora="r16"), here) is None


def test_lora_spells_rank_targets_and_variants() -> None:
    here = setting(allowed=frozenset({"lora"}))
    plan = SFT.plan(candidate(here, lora="r32-attention-rslora-dora"), here)
    assert plan.model["lora_r"] == 32
    assert plan.model["lora_alpha"] == 64
    assert plan.model["lora_target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert plan.model["use_rslora"] is plan.model["use_dora"] is True


def test_lora_on_a_single_kind_of_projection_names_it_as_peft_reads_a_string() -> None:
    here = setting(of=workload(linear_modules=("c_attn", "c_fc")), allowed=frozenset({"lora"}))
    plan = SFT.plan(candidate(here, lora="r16-attention"), here)
    targets = plan.model["lora_target_modules"]
    assert isinstance(targets, str)
    assert re.fullmatch(targets, "transformer.h.0.attn.c_attn")
    assert not re.fullmatch(targets, "transformer.h.0.mlp.c_fc")


@pytest.mark.parametrize(("version", "every", "of_adapters"), [("5.16.0", True, True), ("5.23.0", True, False)])
def test_ways_to_checkpoint_follow_the_release_of_transformers(version: str, every: bool, of_adapters: bool) -> None:
    here = setting(allowed=frozenset({"lora"}))
    here = replace(here, machine=replace(here.machine, packages={**here.machine.packages, "transformers": version}))
    assert (SFT.illegal(candidate(here, gradient_checkpointing="every_2"), here) is None) is every
    adapted = candidate(here, lora="r16", gradient_checkpointing="selective")
    assert (SFT.illegal(adapted, here) is None) is of_adapters


@pytest.mark.parametrize(("version", "known"), [("5.16.4", False), ("5.17.0", True)])
def test_what_is_checkpointed_is_offloaded_where_transformers_knows_how(version: str, known: bool) -> None:
    machine = replace(GPU, packages={"transformers": version})
    checkpointing = find("gradient_checkpointing", SFT.techniques)
    assert (checkpointing.unavailable("offload", machine) is None) is known
    assert checkpointing.unavailable("on", machine) is None


def test_adapters_of_fused_experts_have_no_dropout_and_no_dora() -> None:
    here = setting(of=workload(fused_experts=True), allowed=frozenset({"lora"}))
    assert SFT.plan(candidate(here, lora="r16"), here).model["lora_dropout"] == 0.0
    assert "lora_dropout" not in SFT.plan(candidate(here, lora="r16-attention"), here).model
    assert "r64-attention-dora" in str(SFT.illegal(candidate(here, lora="r64-dora"), here))
    assert SFT.illegal(candidate(here, lora="r16-attention-dora"), here) is None


def test_lora_on_a_language_model_names_its_modules_and_needs_a_tower_beside_it() -> None:
    modules = ("q_proj", "o_proj", "up_proj")
    here = setting(of=workload(language_modules=modules), allowed=frozenset({"lora"}))
    inside = "model.language_model.layers.0.self_attn."
    for lora, adapted in (("r16-language", set(modules)), ("r8-language-attention-dora", {"q_proj", "o_proj"})):
        chosen = candidate(here, lora=lora)
        targets = str(SFT.plan(chosen, here).model["lora_target_modules"])
        assert SFT.illegal(chosen, here) is None
        assert {name for name in (*modules, "fc1") if re.fullmatch(targets, inside + name)} == adapted
        assert not re.fullmatch(targets, "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj")
        refused = [
            setting(allowed=here.allowed),
            replace(here, workload=workload(language_modules=modules, fused_experts=True)),
        ]
        reasons = [str(SFT.illegal(candidate(other, lora=lora.removesuffix("-dora")), other)) for other in refused]
        assert "this model has no vision tower" in reasons[0]
        assert "PEFT trains the vision tower too" in reasons[1]


def test_lora_on_attention_needs_projections_that_are_known() -> None:
    here = setting(of=workload(linear_modules=("mystery",)), allowed=frozenset({"lora"}))
    adapted = candidate(here, lora="r16-attention")
    assert "mystery" in str(SFT.illegal(adapted, here))
    # A check compares a user's configuration with the plan of every choice, illegal ones included.
    assert not re.fullmatch(str(SFT.plan(adapted, here).model["lora_target_modules"]), "layers.0.mystery")


@pytest.mark.parametrize("modules", [("query", "key", "value"), ("query_proj", "key_proj", "value_proj")])
def test_lora_on_attention_knows_the_projections_of_encoders(modules: tuple[str, ...]) -> None:
    here = setting(of=workload(linear_modules=(*modules, "dense")), allowed=frozenset({"lora"}))
    plan = SFT.plan(candidate(here, lora="r16-attention"), here)
    assert plan.model["lora_target_modules"] == sorted(modules)


def test_activations_are_not_offloaded_twice() -> None:
    here = setting(machine=GPU)
    twice = candidate(here, gradient_checkpointing="offload", activation_offloading="on")
    assert "already" in str(SFT.illegal(twice, here))


def test_checkpointing_every_n_layers_needs_n_layers() -> None:
    here = setting(of=workload(layers=2))
    assert SFT.illegal(candidate(here, gradient_checkpointing="every_2"), here) is None
    assert "only the first layer" in str(SFT.illegal(candidate(here, gradient_checkpointing="every_3"), here))


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({"gradient_checkpointing": "offload"}, "no accelerator"),
        ({"activation_offloading": "on"}, "no accelerator"),
        ({"liger": "on"}, "CUDA GPU"),
        ({"hub_kernels": "on"}, "CUDA GPU"),
        ({"attention": "flex_attention"}, "no backward pass"),
        ({"attention": "flash_attention_2"}, "CUDA GPU"),
        ({"optimizer": "paged_adamw_8bit"}, "no GPU"),
        ({"allocator": "expandable_segments"}, "no GPU"),
        ({"torch_empty_cache_steps": 1}, "no GPU"),
    ],
)
def test_what_a_cpu_cannot_do_is_illegal_there(choices: dict[str, str], why: str) -> None:
    here = setting(machine=CPU, allowed=frozenset({"optimizer"}))
    assert why in str(SFT.illegal(candidate(here, **choices), here))


def test_plans_differ_exactly_where_training_differs() -> None:
    here = setting()
    same = [candidate(here, max_length=length) for length in (2000, 4096)]
    assert len({SFT.plan(item, here).fingerprint for item in same}) == 1
    assert SFT.plan(same[0], here).fingerprint != SFT.plan(candidate(here), here).fingerprint


def test_a_cpu_is_named_in_the_plan_and_a_gpu_is_not_shared_with_the_cpu() -> None:
    assert SFT.plan(candidate(setting()), setting()).args["use_cpu"] is True
    on_gpu = setting(machine=GPU)
    assert SFT.plan(candidate(on_gpu), on_gpu).args["model_init_kwargs"] == {"device_map": {"": 0}}
    kernels = candidate(on_gpu, hub_kernels="on")
    assert SFT.plan(kernels, on_gpu).args["model_init_kwargs"] == {"device_map": {"": 0}, "use_kernels": True}


def test_a_group_of_processes_loads_to_the_host() -> None:
    alone, eight = setting(machine=GPU), setting(machine=machine_with(GPU, processes=8))
    # transformers refuses a device with ZeRO-3, which makes a group of one process too.
    offloading = candidate(alone, sharding="zero3", offload="parameters")
    for plan in (SFT.plan(candidate(eight), eight), SFT.plan(offloading, alone)):
        assert plan.args["model_init_kwargs"] == {"device_map": None}


@pytest.mark.parametrize(("own", "legal"), [("ddp", {"ddp"}), ("zero2", {"zero2"})])
def test_adafactor_is_moved_neither_to_deepspeed_or_fsdp2_nor_away_from_it(own: str, legal: set[str]) -> None:
    here = replace(setting(machine=EIGHT), base=Base("mine.yaml", {"optimizer": "adafactor", "sharding": own}))
    engines = {
        engine: candidate(here, optimizer="adafactor", sharding=engine) for engine in ("ddp", "zero2", "zero3", "fsdp2")
    }
    assert {engine for engine, chosen in engines.items() if SFT.illegal(chosen, here) is None} == legal
    assert "flat tensor" in str(SFT.illegal(engines["zero3"], here))


def test_liger_is_left_out_for_an_architecture_that_it_leaves_as_it_is() -> None:
    pytest.importorskip("liger_kernel")
    here = setting(machine=GPU, of=workload(model_type="starcoder2"))
    assert "Liger has no layers for starcoder2" in str(SFT.illegal(candidate(here, liger="on"), here))
    known = setting(machine=GPU, of=workload(model_type="llama"))
    assert SFT.illegal(candidate(known, liger="on"), known) is None


def test_growing_segments_are_an_environment_variable_of_the_plan() -> None:
    here = setting(machine=GPU)
    choices = ("default", "expandable_segments")
    plain, growing = (SFT.plan(candidate(here, allocator=choice), here) for choice in choices)
    assert (plain.env, plain.expandable_segments) == ({}, False)
    # PyTorch reads the older name first, which a shell or an image may have set.
    assert growing.env == dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:True")
    assert growing.expandable_segments
    assert plain.fingerprint != growing.fingerprint


@pytest.mark.parametrize(("steps", "emptied"), [("off", False), (1, True), (10, False)])
def test_only_a_cache_that_is_emptied_in_every_step_is_planned_as_emptied(steps: str | int, emptied: bool) -> None:
    here = setting(machine=GPU)
    plan = SFT.plan(candidate(here, torch_empty_cache_steps=steps), here)
    assert plan.args.get("torch_empty_cache_steps", "off") == steps
    assert plan.empties_cache is emptied


def test_evaluation_has_a_size_of_its_own_only_where_there_is_one() -> None:
    plain = setting()
    of = replace(workload(), evaluation=workload().dataset, evaluation_source=workload().dataset_source)
    evaluated = setting(of=of)
    knob = "per_device_eval_batch_size"
    # TRL's default of 8 rows might not fit, and there is no evaluation.
    assert SFT.plan(candidate(plain, per_device_train_batch_size=2), plain).args[knob] == 2
    plan = SFT.plan(candidate(evaluated, per_device_train_batch_size=2, **{knob: 4}), evaluated)
    assert (plan.args[knob], plan.args["eval_strategy"], plan.evaluates) == (4, "epoch", True)
    assert not SFT.plan(candidate(plain), plain).evaluates
    assert "there are no rows to evaluate on" in str(SFT.illegal(candidate(plain).but(**{knob: 4}), plain))
    assert problem(plain).choices[knob] == (8,)
    assert problem(evaluated).choices[knob] == (8, 1, 2, 4, 16, 32)


def test_segments_grow_beside_vllm_unless_its_engine_is_on_several_gpus() -> None:
    grpo = trainers()["grpo"]
    here = setting(machine=GPU, of=workload(trainer="grpo"), allowed=frozenset({"vllm"}))
    start = grpo.defaults(here)
    for vllm, gpus, refused in (
        ("colocate-sleep", 1, False), ("colocate-sleep", 2, True), ("colocate", 4, True), ("server", 2, False),
    ):  # fmt: skip
        shared = start.but(vllm=vllm, vllm_tensor_parallel_size=gpus)
        found = [
            find("allocator", grpo.techniques).conflict(choice, shared.but(allocator=choice), here)
            for choice in ("default", "expandable_segments")
        ]
        assert found[0] is None
        assert (f"among {gpus} GPUs cannot share segments that grow" in str(found[1])) is refused


def test_what_vllm_generates_is_not_batched_by_transformers() -> None:
    grpo = trainers()["grpo"]
    of = workload(trainer="grpo")
    here = setting(machine=replace(GPU, planned=True), of=of, allowed=frozenset({"vllm", "continuous_batching"}))
    start = grpo.defaults(here)
    newer = replace(here, machine=replace(GPU, packages={"transformers": "5.24.0"}))
    failing = find("continuous_batching", grpo.techniques).conflict("on", start, newer)
    assert isinstance(failing, CrashReason)
    assert "from transformers 5.24 on" in failing
    assert find("continuous_batching", grpo.techniques).conflict("on", start.but(precision="float32"), newer) is None
    assert find("continuous_batching", grpo.techniques).conflict("on", start, here) is None
    both = start.but(vllm="colocate", continuous_batching="on")
    assert "does not run" in str(find("continuous_batching", grpo.techniques).conflict("on", both, here))


def test_an_adapter_of_a_reward_model_trains_its_head() -> None:
    reward = trainers()["reward"]
    here = setting(of=workload(trainer="reward"), allowed=frozenset({"peft_config"}))
    start = reward.defaults(here)
    assert reward.plan(start.but(peft_config='{"peft_type":"IA3"}'), here).peft["task_type"] == "SEQ_CLS"
    assert not reward.plan(start, here).peft


def test_a_field_that_the_installed_trl_lacks_is_a_reason_and_is_left_out_of_plans() -> None:
    here = setting(machine=GPU, of=replace(workload(), absent=("args.use_liger_kernel", "model.use_dora")))
    assert "use_liger_kernel" in SFT.plan(candidate(setting(machine=GPU)), setting(machine=GPU)).args
    assert "use_liger_kernel" not in SFT.plan(candidate(here), here).args
    assert SFT.illegal(candidate(here), here) is None
    reason = "liger=on: the installed TRL has no field for args.use_liger_kernel"
    assert SFT.illegal(candidate(here, liger="on"), here) == reason
    allowed = replace(here, allowed=frozenset({"lora"}))
    assert SFT.illegal(candidate(allowed, lora="r16"), allowed) is None
    assert "model.use_dora" in str(SFT.illegal(candidate(allowed, lora="r16-dora"), allowed))


def evaluated(train: dict[int, int], evaluation: dict[int, int]) -> Workload:
    """Return a workload with rows to evaluate on."""
    plain = workload(lengths=train)
    return replace(plain, evaluation=replace(plain.dataset, lengths=LengthDistribution(evaluation)))


def test_fp16_on_a_cpu_is_refused_since_accelerate_computes_in_float32() -> None:
    here = setting(machine=CPU, allowed=frozenset({"precision"}))
    assert "computes in float32 on a CPU" in str(SFT.illegal(candidate(here, precision="float32+fp16"), here))
    here = replace(here, machine=GPU)
    assert SFT.illegal(candidate(here, precision="float32+fp16"), here) is None


@pytest.mark.parametrize("name", ["dpo", "kto"])
@pytest.mark.parametrize(
    ("sharding", "lora", "reference", "refused"),
    [
        ("fsdp2", "r16", "precomputed", True),
        ("fsdp2", "none", "precomputed", False),
        ("fsdp2", "r16", "per_batch", False),
        ("zero3", "r16", "precomputed", False),
    ],
)
def test_fsdp2_has_no_adapters_on_the_gpu_before_it_trains(
    name: str, sharding: str, lora: str, reference: str, refused: bool
) -> None:
    trainer, of = trainers()[name], workload(trainer=name)
    for machine in (machine_with(GPU, processes=2), TWO):
        here = setting(machine=machine, of=of)
        start = trainer.defaults(here)
        chosen = start.but(sharding=sharding, lora=lora, reference=reference)
        found = find("sharding", trainer.techniques).conflict(sharding, chosen, here)
        assert isinstance(found, CrashReason) is (refused and machine is not TWO)


@pytest.mark.parametrize(
    ("choices", "entries", "refused"),
    [
        ({"reference": "precomputed"}, {"args.bf16_full_eval": True}, True),
        ({"reference": "precomputed"}, {"args.fp16_full_eval": True}, True),
        ({"reference": "precomputed"}, {"args.bf16_full_eval": False}, False),
        ({"reference": "per_batch"}, {"args.bf16_full_eval": True}, False),
        ({"reference": "precomputed", "sharding": "zero2"}, {"args.bf16_full_eval": True}, False),
        ({"reference": "precomputed", "quantization": "4bit-nf4"}, {"args.bf16_full_eval": True}, False),
    ],
)
def test_a_reference_is_not_precomputed_by_a_model_that_is_not_on_the_gpu_yet(
    choices: dict[str, str], entries: dict[str, bool], refused: bool
) -> None:
    trainer = trainers()["dpo"]
    for processes in (1, 2):
        machine = machine_with(GPU, processes=processes)
        here = setting(machine=machine, of=workload(trainer="dpo"))
        here = replace(here, base=Base("mine.yaml", {}, entries=entries))
        start = trainer.defaults(here).but(**choices)
        found = find("sharding", trainer.techniques).conflict(start["sharding"], start, here)
        assert isinstance(found, CrashReason) is (refused and processes > 1)


@pytest.mark.parametrize("zero3", [True, False])
def test_selective_checkpointing_of_adapters_is_refused_where_weights_are_shared_out(zero3: bool) -> None:
    machine = replace(TWO, packages={**TWO.packages, "transformers": "5.16.0"})
    here = setting(machine=machine, allowed=frozenset({"lora"}))
    choices: dict[str, Choice] = {"lora": "r16", "gradient_checkpointing": "selective"}
    reason = SFT.illegal(candidate(here, sharding="zero3" if zero3 else "ddp", **choices), here)
    assert ("with sharding=zero3" in str(reason)) if zero3 else reason is None


@pytest.mark.parametrize(
    ("knob", "text"), [("max_length", "²"), ("max_length", "coverage*0"), ("peft_config", "~nosuchuser/a")]
)
def test_what_looks_like_a_choice_and_is_none_is_refused(knob: str, text: str) -> None:
    with pytest.raises(InputError, match="is not a choice of"):
        find(knob, SFT.techniques).parse(text, setting())
