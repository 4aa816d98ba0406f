"""Contract with TRL: it refuses the combinations that the catalogue calls illegal, or silently trains otherwise.

Each test builds the real trainer. If a TRL release accepts a combination that it refused, a test here fails, and the
rule in the catalogue can be removed.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from autotune.core.candidate import Choice
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.techniques.activation_offloading import ActivationOffloading
from autotune.techniques.liger import _supported_models
from autotune.techniques.versions import accepted_versions
from autotune.trainers import find_trainer
from autotune.trainers.kto import WITHOUT_KL
from tests.contract.building import built
from tests.settings import GPU, setting

Build = Callable[..., Any]
TrainAlone = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def build(small_model_directory: Path, small_dataset_file: Path, tmp_path: Path) -> Build:
    """Return a function that makes an ``SFTTrainer`` on the small model and dataset from configuration fields."""
    rows = [json.loads(line) for line in small_dataset_file.read_text(encoding="utf-8").splitlines()]
    return partial(built, "sft", small_model_directory, tmp_path / "out", rows=rows, max_steps=1)


@pytest.fixture
def train_alone(small_model_directory: Path, small_dataset_file: Path, tmp_path: Path) -> TrainAlone:
    """Return a function that trains one step in a process of its own, with more configuration fields as source code.

    Liger replaces classes of transformers for good, and a trace registers a device that looks like an accelerator.
    """

    def train(fields: str) -> subprocess.CompletedProcess[str]:
        script = f"""
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
rows = load_dataset("json", data_files={str(small_dataset_file)!r}, split="train")
args = SFTConfig({str(tmp_path)!r}, use_cpu=True, bf16=False, max_steps=1, report_to="none", save_strategy="no",
                 disable_tqdm=True, {fields})
SFTTrainer({str(small_model_directory)!r}, args=args, train_dataset=rows).train()
"""
        return subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=120)

    return train


def test_padding_free_rows_are_not_cut_by_trl(build: Build) -> None:
    with pytest.raises(ValueError, match="`max_length` is not enforced"):
        build(padding_free=True, max_length=64)


def test_packing_needs_a_length(build: Build) -> None:
    with pytest.raises(ValueError, match="`max_length` can't be `None`"):
        build(packing=True, max_length=None)


def test_bfd_is_padding_free_by_itself(build: Build) -> None:
    assert build(packing=True, packing_strategy="bfd", max_length=512).padding_free
    assert build(packing=True, packing_strategy="bfd_split", max_length=512).padding_free
    assert not build(packing=True, packing_strategy="wrapped", max_length=512).padding_free


def test_bfd_split_packs_as_bfd_where_nothing_overflows(build: Build) -> None:
    rows = [
        build(packing=True, packing_strategy=strategy, max_length=1024).train_dataset.to_list()
        for strategy in ("bfd", "bfd_split")
    ]
    assert max(max(row["seq_lengths"]) for row in rows[0]) < 1024
    assert rows[0] == rows[1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fields", "reason", "reason_of_cuda_build"),
    [
        ("activation_offloading=True", "AttributeError", "CUDA"),
        # PyTorch built for CUDA takes ordinary memory for pinned memory where there is no GPU, so that this trains.
        ("gradient_checkpointing=True, gradient_checkpointing_kwargs={'offload': True}", "pin", None),
        ("use_liger_kernel=True", "driver", "driver"),
    ],
    ids=["activation_offloading", "offload", "liger"],
)
def test_what_needs_an_accelerator_fails_without_one(
    train_alone: TrainAlone, fields: str, reason: str, reason_of_cuda_build: str | None
) -> None:
    import torch

    if "liger" in fields:
        pytest.importorskip("liger_kernel")
    done = train_alone(fields)
    expected = reason if torch.version.cuda is None else reason_of_cuda_build
    assert (done.returncode == 0) is (expected is None)
    assert expected is None or expected in done.stderr[done.stderr.rindex("Traceback") :]


def test_selective_checkpointing_fails_on_adapters_since_transformers_5_23(build: Build) -> None:
    words = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}
    fails = Version(metadata.version("transformers")) >= Version("5.23")
    with pytest.raises(ValueError, match="selective") if fails else nullcontext():
        build(words=words, gradient_checkpointing=True, gradient_checkpointing_kwargs={"selective": True}).train()


def test_flex_attention_has_no_backward_pass_on_a_cpu(build: Build) -> None:
    import torch

    # Otherwise the masks are compiled first, for seconds.
    with torch.compiler.set_stance("force_eager"), pytest.raises(NotImplementedError, match="backward on CPU"):
        build(words={"attn_implementation": "flex_attention"}, gradient_checkpointing=False).train()


def test_flash_attention_is_refused_without_its_package(build: Build) -> None:
    with pytest.raises((ImportError, ValueError)):
        build(words={"attn_implementation": "flash_attention_2"})


def test_fp16_trains_on_a_cpu(build: Build) -> None:
    build(fp16=True).train()


def test_quantised_weights_are_not_trained_without_adapters(build: Build) -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match="fine-tuning on purely quantized"):
        build(words={"load_in_4bit": True, "dtype": "bfloat16"})


def test_trl_warns_of_padding_free_where_there_is_no_padding(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.trainer import sft_trainer

    warned: list[str] = []
    monkeypatch.setattr(sft_trainer.logger, "warning", warned.append)
    build(padding_free=True, max_length=None, per_device_train_batch_size=1)
    build(padding_free=True, packing=True, packing_strategy="wrapped", max_length=512)
    assert any("batch size of 1" in text for text in warned)
    assert any("'wrapped' packing strategy" in text for text in warned)


@pytest.mark.parametrize(("steps", "emptied_in"), [(1, (0, 1)), (2, (0,))])
def test_the_cache_is_emptied_between_the_passes_of_every_micro_batch(
    build: Build, monkeypatch: pytest.MonkeyPatch, steps: int, emptied_in: tuple[int, ...]
) -> None:
    import transformers.trainer

    done: list[tuple[str, int]] = []
    trainer = build(torch_empty_cache_steps=steps, gradient_accumulation_steps=2, max_steps=2)
    forward, backward = trainer.compute_loss, trainer.accelerator.backward

    def noting(what: str, inner: Callable[..., Any] = lambda: None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            done.append((what, trainer.state.global_step))
            return inner(*args, **kwargs)

        return call

    monkeypatch.setattr(transformers.trainer, "clear_device_cache", noting("empty"))
    monkeypatch.setattr(trainer, "compute_loss", noting("forward", forward))
    monkeypatch.setattr(trainer.accelerator, "backward", noting("backward", backward))
    trainer.train()

    order = ["forward", "empty", "backward"]
    assert done == [
        (what, step) for step in (0, 1) for _ in range(2) for what in order if what != "empty" or step in emptied_in
    ]


def test_offloaded_activations_lose_the_strides_of_transposed_views() -> None:
    """FlexAttention's backward pass asserts them; ``tests/nullgpu/test_training.py`` runs it."""
    import torch
    from trl.models import activation_offloading as offloading

    # Offloading needs an accelerator; with the CPU for one, the same hooks copy within its memory.
    with mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cpu")):
        hooks = offloading.OffloadActivations(use_pin_memory=False, use_streams=False)
    several, single = (torch.zeros(1, 16, heads, 64).transpose(1, 2) for heads in (4, 1))
    assert hooks.unpack_hook(hooks.pack_hook(several)).stride() == several.contiguous().stride() != several.stride()
    assert hooks.unpack_hook(hooks.pack_hook(single)).stride() == single.stride()


ROWS = {
    "dpo": [{"prompt": f"a b {place}", "chosen": " c d" * (1 + place % 3), "rejected": " c"} for place in range(8)],
    "kto": [{"prompt": f"a b {place}", "completion": " c d" * (1 + place % 3), "label": place % 2 == 0}
            for place in range(8)],
}  # fmt: skip
TRAINERS = pytest.mark.parametrize("trainer", ROWS)


@pytest.fixture
def with_reference(small_model_directory: Path, tmp_path: Path) -> Build:
    """Return a function that makes TRL's trainer of a name on the small model from configuration fields."""

    def on_small_model(trainer: str, **fields: Any) -> Any:
        usual: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        return built(trainer, small_model_directory, tmp_path / "out", **{**usual, "rows": ROWS[trainer], **fields})

    return on_small_model


def illegal(trainer: str, **choices: Choice) -> str | None:
    """Return why a candidate is illegal on a GPU where everything is allowed."""
    known, here = find_trainer(trainer), of(trainer)
    baseline = known.defaults(here).but(max_length=2000)
    return known.illegal(known.normal(baseline.but(**choices), here), here)


def of(trainer: str, *allowed: str) -> Setting:
    """Return a setting of a trainer."""
    here, depends = setting(machine=GPU), find_trainer(trainer).loss_depends_on({})
    of_trainer = replace(here.workload, trainer=trainer)
    return replace(here, workload=of_trainer, allowed=frozenset(allowed), loss_depends_on=depends)


@TRAINERS
def test_ways_to_checkpoint_that_reach_the_reference_s_pass_need_it_precomputed(trainer: str) -> None:
    # What TRL does by these keys is in test_trl_cells.py.
    for choice in ("every_2", "offload"):
        assert "needs reference=precomputed" in str(illegal(trainer, gradient_checkpointing=choice))
        assert illegal(trainer, gradient_checkpointing=choice, reference="precomputed") is None


@TRAINERS
def test_selective_checkpointing_is_refused_by_pytorch(trainer: str, with_reference: Build) -> None:
    words = {"gradient_checkpointing_kwargs": {"selective": True}}
    with pytest.raises(ValueError, match="selective"):
        with_reference(trainer, precompute_ref_log_probs=True, **words).train()
    assert "refuses it" in str(illegal(trainer, gradient_checkpointing="selective", reference="precomputed"))


def test_kto_needs_two_rows_in_a_micro_batch(with_reference: Build) -> None:
    with pytest.raises(ValueError, match="batch size must be > 1"):
        with_reference("kto", per_device_train_batch_size=1)
    known, here = find_trainer("kto"), of("kto", "per_device_train_batch_size")
    baseline = known.defaults(here).but(max_length=2000)
    assert "at least 2" in str(known.illegal(baseline.but(per_device_train_batch_size=1), here))
    assert known.illegal(baseline.but(per_device_train_batch_size=2), here) is None


def test_kto_needs_one_row_where_no_kl_divergence_is_estimated(with_reference: Build) -> None:
    args = {"per_device_train_batch_size": 1, "loss_type": min(WITHOUT_KL)}
    trainer = with_reference("kto", **args)
    trainer.train()
    assert trainer.state.global_step > 0
    plan = TrainingPlan("kto", {**args, "gradient_accumulation_steps": 1})
    assert find_trainer("kto").refused(plan, of("kto", "beta").workload) is None


def test_the_batch_size_is_part_of_kto_s_objective(with_reference: Build) -> None:
    answers = [
        with_reference("kto", per_device_train_batch_size=rows).train_dataset["KL_completion_ids"][:] for rows in (4, 8)
    ]
    assert answers[0] != answers[1]
    assert "changes training here (KTO exchanges answers" in str(illegal("kto", per_device_train_batch_size=4))
    assert illegal("kto", per_device_train_batch_size=8) is None
    assert illegal("dpo", per_device_train_batch_size=4) is None


def test_kto_ends_after_no_step_where_it_drops_all_rows(with_reference: Build) -> None:
    trainer = with_reference("kto", max_length=2)
    trainer.train()
    assert trainer.state.global_step == 0


def test_the_metadata_of_transformers_has_the_versions_of_kernels_that_it_takes() -> None:
    from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION

    accepted = SpecifierSet(accepted_versions("kernels"))
    assert KERNELS_MIN_VERSION in accepted
    assert KERNELS_MAX_VERSION not in accepted
    assert f"{KERNELS_MAX_VERSION.removesuffix('.0')}.dev0" not in accepted


def test_adafactor_factors_no_flat_tensor() -> None:
    import torch
    from transformers.optimization import Adafactor

    states = []
    for shape in ((64, 32), (64 * 32,)):
        weight = torch.nn.Parameter(torch.ones(shape))
        weight.grad = torch.ones_like(weight)
        optimizer = Adafactor([weight], lr=1e-3, scale_parameter=False, relative_step=False)
        optimizer.step()
        states.append(optimizer.state[weight].keys())
    assert "exp_avg_sq_row" in states[0]
    assert "exp_avg_sq_row" not in states[1]


def test_the_architectures_of_liger_are_those_that_it_changes() -> None:
    monkey_patch = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    assert _supported_models() == monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.keys()


def test_trl_holds_as_many_offloaded_activations_as_the_extrapolation_assumes() -> None:
    from trl.models.activation_offloading import OffloadActivations

    plan = TrainingPlan("sft", {"activation_offloading": True})
    held = inspect.signature(OffloadActivations).parameters["max_fwd_stash_size"].default
    assert ActivationOffloading.impact.in_plan(plan).edges == held
