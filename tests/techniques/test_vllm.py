"""The rules of vLLM's techniques: their requirements, legal choices, and entries of the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import Machine
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.setting import Setting
from autotune.core.workload import KeyValueCache
from autotune.errors import InputError
from autotune.techniques import catalogue, find
from autotune.techniques.base import CrashReason, UnsearchedReason, impossible
from autotune.techniques.vllm_tensor_parallel_size import indivisible_heads
from autotune.trainers import find_trainer
from autotune.trainers.groups import OLD_PASS
from autotune.trainers.prompts import GENERATION
from tests.settings import CPU, GPU, machine_with, problem, setting, workload

GRPO = find_trainer("grpo")
PLANNED = replace(GPU, planned=True)
ALLOWED = frozenset({"vllm", "quantization", "lora", "max_completion_length"})


def here(machine: Machine = PLANNED, **changes: object) -> Setting:
    of = workload(trainer="grpo", max_positions=4096)
    return replace(setting(machine=machine, of=of, allowed=ALLOWED), **changes)  # type: ignore[arg-type]


def candidate(at: Setting, **choices: Choice) -> Candidate:
    start = GRPO.defaults(at)
    return GRPO.normal(start.but(**choices), at)


def with_version(version: str) -> Machine:
    return replace(GPU, packages={**GPU.packages, "vllm": version})


@pytest.mark.parametrize(
    ("machine", "choice", "why"),
    [
        (CPU, "colocate", "needs a CUDA GPU"),
        (replace(CPU, planned=True), "colocate", "needs a CUDA GPU"),
        (GPU, "colocate", "not installed"),
        (with_version("0.21.0"), "colocate", "0.22 to 0.31, and 0.21.0 is installed"),
        (with_version("0.33.0"), "colocate-sleep", "0.22 to 0.31, and 0.33.0 is installed"),
        (with_version("0.24.0+cu129"), "colocate", None),
        (with_version("0.31.0"), "colocate-sleep", None),
        (with_version("0.31.0"), "server", "probes start none"),
        (PLANNED, "colocate", None),
        (PLANNED, "server", None),
        (GPU, "off", None),
    ],
)
def test_vllm_is_there_where_trl_can_use_it_or_where_nothing_runs(
    machine: Machine, choice: str, why: str | None
) -> None:
    found = find("vllm", catalogue()).unavailable(choice, machine)
    assert (why in found) if why and found else (found is why)


def test_vllm_changes_training_and_has_to_be_allowed() -> None:
    at = here(allowed=frozenset())
    assert "--allow vllm" in str(GRPO.illegal(candidate(at, vllm="colocate"), at))
    assert GRPO.illegal(candidate(here(), vllm="colocate"), here()) is None


@pytest.mark.parametrize("vllm", ["server", "colocate", "colocate-sleep"])
@pytest.mark.parametrize("name", ["grpo", "rloo", "online_dpo", "distillation"])
def test_vllm_is_planned_beside_each_trainer_that_generates(name: str, vllm: str) -> None:
    trainer, of = find_trainer(name), workload(trainer=name, lengths={100: 64}, max_positions=4096)
    at = setting(machine=PLANNED, of=of, allowed=ALLOWED, global_batch_size=8)
    start = trainer.defaults(at)
    # TRL's online DPO gives vLLM its weights back once in a step, so that a step is one micro-batch here.
    wanted = trainer.normal(start.but(vllm=vllm, per_device_train_batch_size=8), at)
    assert trainer.illegal(wanted, at) is None


def test_what_belongs_to_vllm_is_searched_only_if_vllm_is() -> None:
    several = machine_with(PLANNED, processes=4)
    without = problem(here(several, allowed=frozenset()), trainer="grpo").choices
    assert without["vllm"] == ("off",)
    assert without["vllm_gpu_memory_utilization"] == ("0.3",)
    assert without["vllm_tensor_parallel_size"] == (1,)
    searched = problem(here(several), trainer="grpo").choices
    assert searched["vllm"] == ("off", "server", "colocate", "colocate-sleep")
    assert len(searched["vllm_gpu_memory_utilization"]) > 1
    assert searched["vllm_tensor_parallel_size"] == (1, 2, 4)
    assert problem(here(), trainer="grpo").choices["vllm_tensor_parallel_size"] == (1,)


@pytest.mark.parametrize("vllm", ["off", "server"])
def test_a_share_of_the_gpu_means_nothing_where_vllm_is_elsewhere(vllm: str) -> None:
    at = here()
    shares = {candidate(at, vllm=vllm, vllm_gpu_memory_utilization=share) for share in ("0.3", "0.5")}
    assert len(shares) == 1
    args = GRPO.plan(shares.pop(), at).args
    assert {name for name in args if name.startswith("vllm_")} == (set() if vllm == "off" else {"vllm_mode"})


def test_the_plan_says_what_trl_calls_it() -> None:
    at = here()
    args = GRPO.plan(candidate(at, vllm="colocate-sleep", vllm_gpu_memory_utilization="0.45"), at).args
    # The longest prompt of the data has 2,000 tokens, a completion 512 by default.
    assert {name: value for name, value in args.items() if "vllm" in name} == {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.45,
        "vllm_max_model_length": 2512,
    }  # fmt: skip
    assert GRPO.plan(candidate(at, vllm="server"), at).args["vllm_mode"] == "server"


def test_the_longest_prompt_has_to_fit_with_its_completion() -> None:
    at = here()
    assert "2,512 tokens together, and vLLM takes only 2,048" in str(
        GRPO.illegal(candidate(at, vllm="colocate", vllm_max_model_length=2048), at)
    )
    assert GRPO.illegal(candidate(at, vllm="colocate", vllm_max_model_length=2512), at) is None
    assert (
        "vllm_max_model_length" not in GRPO.plan(candidate(at, vllm="colocate", vllm_max_model_length="model"), at).args
    )


def test_vllm_refuses_sequences_beyond_the_model_s_positions() -> None:
    at = here(workload=workload(trainer="grpo"))
    assert "2,512 tokens of a model that was made for 2,048" in str(GRPO.illegal(candidate(at, vllm="colocate"), at))


def test_vllm_takes_quantised_weights_in_4_bits_in_the_training_s_process_alone() -> None:
    at = here()
    for vllm, quantization, reason in (
        ("colocate", "8bit", "TRL refuses"), ("colocate", "4bit-nf4", ""), ("server", "8bit", "packed weights"),
        ("server", "4bit-nf4", "packed weights"), ("server", "none", ""),
    ):  # fmt: skip
        quantised = candidate(at, vllm=vllm, quantization=quantization, lora="r16", precision="bfloat16")
        found = find("vllm", GRPO.techniques).conflict(vllm, quantised, at)
        assert isinstance(found, CrashReason) is bool(reason)
        assert reason in str(GRPO.illegal(quantised, at) or "")


def test_tensor_parallelism_divides_the_processes() -> None:
    two = machine_with(PLANNED, processes=2)
    size = find("vllm_tensor_parallel_size", GRPO.techniques)
    assert "divides the 1 process" in str(impossible(size, 2, here()))
    assert impossible(size, 2, here(two)) is None
    assert "divides the 2 processes" in str(impossible(size, 3, here(two)))


def test_tensor_parallelism_stays_within_a_machine() -> None:
    sixteen = machine_with(PLANNED, processes=16, machines=4)
    size = find("vllm_tensor_parallel_size", GRPO.techniques)
    assert impossible(size, 4, here(sixteen)) is None
    reason = impossible(size, 8, here(sixteen))
    assert reason == "an engine over several machines is not planned: each has 4 GPUs"
    # It may run.
    assert isinstance(reason, UnsearchedReason)


def test_tensor_parallelism_divides_the_heads_as_vllm_demands() -> None:
    six = here(machine_with(PLANNED, processes=6), workload=workload(trainer="grpo", attention_heads=32))
    size = find("vllm_tensor_parallel_size", GRPO.techniques)
    assert "cannot divide 32 attention heads among 3 GPUs" in str(impossible(size, 3, six))
    assert impossible(size, 2, six) is None
    # microsoft/phi-4 (vLLM issue 16021).
    phi = workload(attention_heads=40, cache=KeyValueCache(40, 10, 256)).model
    few = replace(phi, cache=KeyValueCache(40, 2, 256))
    assert indivisible_heads(phi, 4) == "vLLM cannot divide 10 heads of keys and values among 4 GPUs"
    assert [indivisible_heads(phi, 2), indivisible_heads(phi, 10), indivisible_heads(few, 4)] == [None] * 3


def test_processes_of_online_dpo_share_no_vllm() -> None:
    two = machine_with(PLANNED, processes=2)
    at = here(two, workload=replace(here().workload, trainer="online_dpo"))
    size = find("vllm_tensor_parallel_size", find_trainer("online_dpo").techniques)
    assert "does not gather the prompts" in str(impossible(size, 2, at))


@pytest.mark.parametrize("share", ["0", "1", "1.5", "-0.1", "nan", "much"])
def test_a_share_lies_between_none_and_all(share: str) -> None:
    with pytest.raises(InputError, match="is not a choice of vllm_gpu_memory_utilization"):
        find("vllm_gpu_memory_utilization", catalogue()).parse(share)


def test_with_vllm_grpo_always_computes_old_log_probabilities() -> None:
    at = here()
    with_vllm, without = (GRPO.plan(candidate(at, vllm=vllm), at) for vllm in ("colocate", "off"))
    assert OLD_PASS in GRPO.program(with_vllm).names
    assert OLD_PASS not in GRPO.program(without).names
    assert GENERATION in GRPO.program(with_vllm).names
    uncorrected = replace(with_vllm, args={**with_vllm.args, "vllm_importance_sampling_correction": False})
    assert OLD_PASS not in GRPO.program(uncorrected).names


def test_the_longest_prompt_may_be_one_to_evaluate_on() -> None:
    at = here()
    longer = replace(at.workload.dataset, lengths=LengthDistribution({3000: 8}))
    at = replace(at, workload=replace(at.workload, evaluation=longer))
    assert GRPO.plan(candidate(at, vllm="colocate"), at).args["vllm_max_model_length"] == 3000 + 512


def test_a_length_is_written_in_digits() -> None:
    with pytest.raises(InputError, match="is not a choice of vllm_max_model_length"):
        find("vllm_max_model_length", catalogue()).parse("²")


@pytest.mark.parametrize(("vllm", "tokens"), [("off", 132), ("colocate", 164)])
def test_online_dpo_pads_completions_of_vllm_to_the_most_that_they_may_have(vllm: str, tokens: int) -> None:
    trainer, of = find_trainer("online_dpo"), workload(lengths={100: 64})
    rows = replace(of, trainer="online_dpo")
    at = setting(machine=PLANNED, of=rows, allowed=ALLOWED, global_batch_size=8)
    start = trainer.defaults(at)
    plan = trainer.plan(trainer.normal(start.but(vllm=vllm, per_device_train_batch_size=8), at), at)
    # A completion has up to 64 tokens, and half of that on average.
    found = trainer.geometry(plan, of.dataset.documents)
    assert found.typical.tokens == tokens
    assert found.tokens == 8 * 2 * (100 + 32)
