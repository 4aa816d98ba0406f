"""Contract with TRL: what the catalogue calls illegal, TRL refuses, or trains silently otherwise.

Each test builds the real trainer. When a TRL release starts to take what it refused, a test here fails, and the rule in
the catalogue can go.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging.version import Version

Build = Callable[..., Any]
TrainAlone = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def build(small_model_directory: Path, small_dataset_file: Path, tmp_path: Path) -> Build:
    """Return a function that makes an ``SFTTrainer`` on the small model from configuration fields."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    rows = datasets.load_dataset("json", data_files=str(small_dataset_file), split="train")

    def built(*, model: dict[str, Any] | None = None, **args: Any) -> Any:
        words = trl.ModelConfig(**(model or {}))
        config = trl.SFTConfig(
            str(tmp_path / "out"),
            **{
                "use_cpu": True,
                "bf16": False,
                "max_steps": 1,
                "report_to": "none",
                "save_strategy": "no",
                "per_device_train_batch_size": 4,
                "disable_tqdm": True,
                "model_init_kwargs": {"dtype": words.dtype, "attn_implementation": words.attn_implementation},
                **args,
            },
        )
        return trl.SFTTrainer(
            str(small_model_directory),
            args=config,
            train_dataset=rows,
            peft_config=trl.get_peft_config(words),
            quantization_config=trl.get_quantization_config(words),
        )

    return built


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
    torch = pytest.importorskip("torch")
    if "liger" in fields:
        pytest.importorskip("liger_kernel")
    done = train_alone(fields)
    expected = reason if torch.version.cuda is None else reason_of_cuda_build
    assert (done.returncode == 0) is (expected is None)
    assert expected is None or expected in done.stderr[done.stderr.rindex("Traceback") :]


@pytest.mark.parametrize("keys", [{"every_n_layers": 2}, {"selective": True}])
def test_the_other_ways_to_checkpoint_train(build: Build, keys: dict[str, object]) -> None:
    build(gradient_checkpointing=True, gradient_checkpointing_kwargs=keys).train()


def test_selective_checkpointing_fails_on_adapters_since_transformers_5_23(build: Build) -> None:
    model = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}
    fails = Version(metadata.version("transformers")) >= Version("5.23")
    with pytest.raises(ValueError, match="selective") if fails else nullcontext():
        build(model=model, gradient_checkpointing=True, gradient_checkpointing_kwargs={"selective": True}).train()


def test_flex_attention_has_no_backward_pass_on_a_cpu(build: Build) -> None:
    with pytest.raises(NotImplementedError):
        build(model={"attn_implementation": "flex_attention"}, gradient_checkpointing=False).train()


def test_flash_attention_is_refused_without_its_package(build: Build) -> None:
    with pytest.raises((ImportError, ValueError)):
        build(model={"attn_implementation": "flash_attention_2"})


def test_fp16_trains_on_a_cpu(build: Build) -> None:
    build(fp16=True).train()


def test_quantised_weights_are_not_trained_without_adapters(build: Build) -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match="fine-tuning on purely quantized"):
        build(model={"load_in_4bit": True, "dtype": "bfloat16"})


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
    torch, offloading = pytest.importorskip("torch"), pytest.importorskip("trl.models.activation_offloading")
    # Offloading needs an accelerator; with the CPU for one, the same hooks copy within its memory.
    with mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cpu")):
        hooks = offloading.OffloadActivations(use_pin_memory=False, use_streams=False)
    several, single = (torch.zeros(1, 16, heads, 64).transpose(1, 2) for heads in (4, 1))
    assert hooks.unpack_hook(hooks.pack_hook(several)).stride() == several.contiguous().stride() != several.stride()
    assert hooks.unpack_hook(hooks.pack_hook(single)).stride() == single.stride()
