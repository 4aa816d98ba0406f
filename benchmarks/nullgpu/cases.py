"""The candidates that are compared: trainers, families, techniques, lengths of rows, GPUs and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autotune.core.candidate import Candidate, Choice
from benchmarks.gpu.cases import Scenario
from benchmarks.nullgpu.models import FAMILIES, PICTURED_ROWS

H100, A100, A100_40, RTX4090 = "H100-80GB", "A100-80GB", "A100-40GB", "RTX4090"
_COMPLETIONS: Mapping[str, Choice] = {"max_completion_length": 32}
_ANSWERS: Mapping[str, Choice] = {"max_new_tokens": 32}


@dataclass(frozen=True)
class Case:
    """One candidate on one kind of GPU.

    Attributes:
        trainer: name of the trainer.
        model: name of the shape in :mod:`benchmarks.nullgpu.models`.
        lengths: from tokens of a row to how many rows have them.
        rows: rows of a micro-batch.
        choices: that differ from TRL's defaults.
        processes: ranks, each on a GPU of its own.
        micro_batches: of an optimizer step in each process.
        prompts: as in :func:`benchmarks.gpu.rows.write_rows_of`.
    """

    trainer: str
    model: str
    lengths: Mapping[int, int]
    rows: int
    choices: Mapping[str, Choice] = field(default_factory=dict)
    gpu: str = H100
    processes: int = 1
    micro_batches: int = 1
    prompts: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def name(self) -> str:
        """A unique name."""
        prompts = {length: f" ({prompt:,} of them prompt)" for length, prompt in self.prompts.items()}
        tokens = ", ".join(f"{length:,}{prompts.get(length, '')}" for length in self.lengths)
        words = [f"{knob}={choice}" for knob, choice in self.choices.items()]
        ranks = [f"{self.processes} ranks"] if self.processes > 1 else []
        steps = [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        return " ".join([self.trainer, self.model, f"{self.rows} x {tokens}", *steps, *words, self.gpu, *ranks])

    @property
    def workload(self) -> str:
        """A key of the model, the trainer and the rows, which several cases share."""
        prompts = f" of which prompts {dict(self.prompts)}" if self.prompts else ""
        return f"{self.trainer} {self.model} {dict(self.lengths)}{prompts}"

    @property
    def scenario(self) -> Scenario:
        """The case's model and rows for a search space; the global batch is that of all ranks."""
        longest = max(self.lengths)
        generates = self.trainer in ("grpo", "rloo", "online_dpo")
        batch = self.rows * self.micro_batches * self.processes
        fix = {"grpo": _COMPLETIONS, "rloo": _COMPLETIONS, "online_dpo": _ANSWERS}.get(self.trainer, {})
        return Scenario(
            self.workload, self.model, self.lengths, batch, None if generates else longest, fix, self.trainer
        )

    @property
    def candidate(self) -> Candidate:
        """The choices that differ from the baseline's."""
        return Candidate({"per_device_train_batch_size": self.rows, **self.choices})


_OFF: Mapping[str, Choice] = {"gradient_checkpointing": "off"}
_BF16: Mapping[str, Choice] = {"precision": "bfloat16"}
_LORA: Mapping[str, Choice] = {"lora": "r16", "precision": "bfloat16"}
_SHORT, _LONG, _PACKED = {1024: 32}, {4096: 8}, {256: 64}
_LONG_PAIRS, _LONGEST = {4554: 8}, {8192: 4}

# Technique by technique on rows of 1,024 tokens.
_CHECKPOINTING: tuple[Mapping[str, Choice], ...] = tuple(
    {"gradient_checkpointing": kind} for kind in ("off", "on", "every_2", "selective", "offload")
)
_OPTIMIZERS: tuple[Mapping[str, Choice], ...] = tuple(
    {"optimizer": kind}
    for kind in (
        "adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit", "adafactor", "sgd",
    )
)  # fmt: skip
_PEFT: tuple[Mapping[str, Choice], ...] = (
    {"lora": "r16"},
    {"lora": "r64", **_BF16},
    {"lora": "r16-attention", **_BF16},
    {"lora": "r16-rslora"},
    {"lora": "r16-dora", **_BF16},
    {**_LORA, "quantization": "8bit"},
    {**_LORA, "quantization": "4bit-nf4"},
    {**_LORA, **_OFF},
    {**_LORA, **_OFF, "quantization": "4bit-nf4"},
    {"peft_config": '{"peft_type":"IA3"}', **_BF16},
    {"peft_config": '{"peft_type":"LOHA","target_modules":"all-linear"}', **_BF16},
)
_MORE: tuple[Mapping[str, Choice], ...] = (
    _BF16,
    {"precision": "float32"},
    {"precision": "float32+fp16"},
    {**_BF16, **_OFF},
    {"attention": "eager"},
    {"attention": "eager", **_OFF},
    {"attention": "flex_attention"},
    {"attention": "flex_attention", **_OFF},
    {"liger": "on"},
    {"liger": "on", **_OFF},
    {"activation_offloading": "on"},
    {"activation_offloading": "on", **_OFF},
    {"allocator": "expandable_segments"},
    {"allocator": "expandable_segments", **_OFF},
    {"torch_empty_cache_steps": "1"},
    {"pad_to_multiple_of": "64"},
)
_PACKING: tuple[Mapping[str, Choice], ...] = (
    {"packing": "bfd"},
    {"packing": "bfd", **_OFF},
    {"packing": "bfd", "liger": "on"},
    {"packing": "bfd_split"},
    {"packing": "wrapped"},
    {"padding_free": "on"},
    {"padding_free": "on", **_OFF},
    {"padding_free": "on", "attention": "eager"},
)


def cases() -> Iterator[Case]:
    """Yield every case."""
    groups = (
        _techniques(), _families(), _rows(), _trainers(), _pictured(), _gpus(), _published(), _ranks(2), _ranks(8),
    )  # fmt: skip
    for group in groups:
        yield from group


def _techniques() -> Iterator[Case]:
    for choices in (*_CHECKPOINTING, *_OPTIMIZERS, *_PEFT, *_MORE):
        yield Case("sft", "llama", _SHORT, 4, choices)
    for choices in _PACKING:
        yield Case("sft", "llama", _PACKED, 4, choices)


def _families() -> Iterator[Case]:
    for family in FAMILIES:
        if family != "llama":
            # transformers has no fused attention for Gemma 2.
            own: Mapping[str, Choice] = {"attention": "eager"} if family == "gemma2" else {}
            yield Case("sft", family, _SHORT, 4, own, micro_batches=2)
            yield Case("sft", family, _SHORT, 4, {**_OFF, **own})
            yield Case("dpo", family, {700: 8}, 2, {"lora": "r16", **_BF16, **own})
    for family in ("qwen2", "gemma3", "mixtral", "gpt_neox", "opt", "phi3"):
        yield Case("reward", family, {700: 8}, 2)
        yield Case("kto", family, {700: 8}, 2, _OFF)


def _rows() -> Iterator[Case]:
    for rows, choices in ((1, {}), (2, _OFF), (8, {}), (8, _OFF), (16, {})):
        yield Case("sft", "llama", _SHORT, rows, choices, micro_batches=2)
    for lengths in (_LONG, _LONGEST):
        for choices in (
            {},
            _OFF,
            {"attention": "flex_attention"},
            {"liger": "on"},
            {"activation_offloading": "on"},
            _LORA,
        ):
            yield Case("sft", "llama", lengths, 1, choices)
    for choices in ({}, _OFF, {"liger": "on"}, {"attention": "eager"}):
        yield Case("sft", "llama", {500: 15, 1000: 1}, 4, choices)
    yield Case("sft", "qwen2", {333: 16}, 3)
    yield Case("sft", "qwen3", {2047: 8}, 2, _OFF)


def _trainers() -> Iterator[Case]:
    for trainer in ("dpo", "kto", "reward"):
        short: tuple[Mapping[str, Choice], ...] = (
            {}, _OFF, {"liger": "on"}, {"activation_offloading": "on"}, {**_LORA, **_OFF},
            {"optimizer": "adamw_bnb_8bit"},
        )  # fmt: skip
        for choices in short:
            yield Case(trainer, "llama", {512: 16}, 4, choices)
        yield Case(trainer, "qwen2", {512: 16}, 2, micro_batches=2)
        long: tuple[Mapping[str, Choice], ...] = ({}, _OFF, {"liger": "on"}, {"activation_offloading": "on"}, _LORA)
        for choices in long:
            yield Case(trainer, "llama", {4554: 4, 3944: 4} if trainer == "kto" else _LONG_PAIRS, 2, choices)
    for trainer in ("dpo", "kto"):
        yield Case(trainer, "llama", {512: 16}, 4, {"reference": "precomputed"})
        yield Case(trainer, "llama", _LONG_PAIRS, 2, {"reference": "precomputed", "liger": "on"})
    for trainer in ("grpo", "rloo"):
        generating: tuple[Mapping[str, Choice], ...] = ({}, _OFF, {"liger": "on"}, _LORA, {"beta": "0.04"})
        for choices in generating:
            yield Case(trainer, "llama", {256: 32}, 8, choices, micro_batches=2)
    for choices in ({}, _OFF, {"liger": "on"}, _LORA):
        yield Case("online_dpo", "llama", {256: 32}, 4, choices, micro_batches=2)


def _pictured() -> Iterator[Case]:
    lengths = {
        "gemma3 with images": {"sft": 41, "dpo": 44, "grpo": 38},
        "llava_next with images": {"sft": 221, "dpo": 224, "grpo": 218},
    }
    for model, longest in lengths.items():
        for trainer, choices in (
            ("sft", {}), ("sft", _OFF), ("sft", _LORA), ("dpo", {**_LORA, **_OFF}), ("grpo", _OFF),
        ):  # fmt: skip
            micro_batches = 2 if trainer == "grpo" else 1
            yield Case(trainer, model, {longest[trainer]: PICTURED_ROWS}, 4, choices, micro_batches=micro_batches)


def _gpus() -> Iterator[Case]:
    for gpu in (A100, A100_40, RTX4090):
        for choices in ({}, _OFF, {"liger": "on"}, {"attention": "eager"}, {**_LORA, "quantization": "4bit-nf4"}):
            yield Case("sft", "llama", _SHORT, 4, choices, gpu)
        yield Case("sft", "qwen2", _LONG, 1, _OFF, gpu)
        yield Case("sft", "qwen3", _PACKED, 4, {"packing": "bfd"}, gpu)
        yield Case("dpo", "llama", {512: 16}, 4, {}, gpu)
        yield Case("kto", "qwen2", {512: 16}, 4, {}, gpu)
        yield Case("reward", "llama", {512: 16}, 4, _OFF, gpu)
        yield Case("grpo", "llama", {256: 32}, 8, {}, gpu, micro_batches=2)


def _published() -> Iterator[Case]:
    model = "qwen2.5-0.5b"
    for rows, choices in ((1, {}), (8, {}), (16, {}), (4, _OFF), (2, {"activation_offloading": "on", **_OFF})):
        yield Case("sft", model, _SHORT, rows, choices)
    yield Case("sft", model, _LONG, 1, {"liger": "on"})
    yield Case("dpo", model, {512: 16}, 4)
    yield Case("sft", "qwen2.5-1.5b", _SHORT, 4)
    yield Case("sft", "qwen2.5-7b", _SHORT, 4, _LORA)
    yield Case("sft", "qwen2.5-7b", _SHORT, 2, {**_LORA, "quantization": "4bit-nf4"}, RTX4090)
    yield Case("sft", "llama-8b", _SHORT, 2, _BF16)
    yield Case("sft", "llama-8b", {2048: 8}, 1, {**_LORA, **_OFF}, A100)


def _ranks(processes: int) -> Iterator[Case]:
    for sharding in ("ddp", "fsdp2", "zero1", "zero2", "zero3"):
        yield Case("sft", "llama", _SHORT, 4, {"sharding": sharding}, processes=processes, micro_batches=2)
        if processes > 2:
            continue
        yield Case("sft", "qwen2", _SHORT, 2, {"sharding": sharding, **_OFF}, processes=processes)
        yield Case("dpo", "llama", {512: 16}, 4, {"sharding": sharding, **_BF16}, A100, processes)
        yield Case("dpo", "llama", {512: 16}, 4, {"sharding": sharding, **_LORA}, processes=processes)
        for choices in ({}, _LORA):
            knobs = {"sharding": sharding, **choices}
            yield Case("grpo", "llama", {256: 32}, 8, knobs, processes=processes, micro_batches=2)
    if processes == 2:
        yield Case("sft", "llama", _SHORT, 4, {"sharding": "fsdp2", "reshard_after_forward": "off"}, processes=2)
        yield Case("sft", "llama", _SHORT, 4, {"sharding": "fsdp2", **_LORA}, processes=2)
        yield Case("sft", "llama", _SHORT, 4, {"sharding": "zero2", "offload": "optimizer"}, processes=2)
        yield Case("sft", "llama", _SHORT, 4, {"sharding": "zero3", "offload": "both"}, processes=2)
        yield Case("sft", "llama", _SHORT, 4, {"sharding": "fsdp2", "offload": "both"}, processes=2)
        yield Case("sft", "llama", {4096: 8}, 1, {"context_parallel": 2, "sharding": "fsdp2"}, processes=2)
        for sharding, offload in (("zero1", "optimizer"), ("zero2", "optimizer"), ("zero3", "both"), ("fsdp2", "both")):
            knobs = {"sharding": sharding, "offload": offload}
            yield Case("sft", "llama", _SHORT, 4, {**knobs, **_LORA}, processes=2)
            yield Case("dpo", "llama", {512: 16}, 4, {**knobs, **_BF16}, processes=2)
        yield Case("kto", "llama", {4554: 16}, 2, {"sharding": "ddp", "liger": "on"}, processes=2)
        yield Case("reward", "llama", {4554: 16}, 2, {"sharding": "fsdp2"}, processes=2)
        yield Case("kto", "llama", {512: 16}, 4, {"sharding": "zero2"}, processes=2)
