"""The configurations of the comparison of predictions and measurements, in an order that may stop anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autotune.core.candidate import Candidate, Choice
from autotune.units import GIB

_NO_CHECKPOINTING: Mapping[str, Choice] = {"gradient_checkpointing": "off"}


@dataclass(frozen=True)
class Scenario:
    """A model and rows to train it on. All rows are equally long, or one is longer than the others, which are equal:
    so the largest micro-batch of a probe and that of a trace are the same by construction.

    Attributes:
        model: name of its shape.
        lengths: from tokens of a row to how many rows have them.
        rows: per optimizer step; completions, where the trainer generates them.
        max_length: tokens of a packed row; without packing, rows are not cut. None for a trainer that cuts nothing.
        fix: choices of all its cases, unless they say otherwise.
        trainer: its name.
        teacher: name of the shape of its teacher, where the trainer has one.
        pixels: width and height of the image that each row has; None: rows of text.
    """

    name: str
    model: str
    lengths: Mapping[int, int]
    rows: int
    max_length: int | None
    fix: Mapping[str, Choice] = field(default_factory=dict)
    trainer: str = "sft"
    teacher: str | None = None
    pixels: tuple[int, int] | None = None


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        scenario: name of what is trained.
        choices: that differ from TRL's defaults, or from what the scenario fixes.
        limit_bytes: memory that it may use on the device, or None for all there is.
    """

    scenario: str
    choices: Candidate
    limit_bytes: int | None = None

    @property
    def name(self) -> str:
        """A unique name."""
        words = [f"{knob}={choice}" for knob, choice in self.choices.items()]
        words += [f"limit={self.limit_bytes / GIB:g}GiB"] if self.limit_bytes is not None else []
        return " ".join([self.scenario, *words])


_ADAPTER: Mapping[str, Choice] = {"lora": "r16", "precision": "bfloat16"}
_SHORT_COMPLETIONS: Mapping[str, Choice] = {"max_completion_length": 128}
_PIXELS = (1008, 756)
_SHORT_ANSWERS: Mapping[str, Choice] = {"max_new_tokens": 128}

SCENARIOS = (
    Scenario("0.5b rows of 1024", "qwen2.5-0.5b", {1024: 64}, 16, 1024),
    Scenario("0.5b rows of 4096", "qwen2.5-0.5b", {4096: 16}, 4, 4096),
    Scenario("0.5b rows of 256", "qwen2.5-0.5b", {256: 256}, 16, 1024),
    Scenario("0.5b padded rows", "qwen2.5-0.5b", {512: 63, 1024: 1}, 16, 1024),
    Scenario("1.5b rows of 1024", "qwen2.5-1.5b", {1024: 64}, 8, 1024),
    Scenario("1.5b rows of 2048", "qwen2.5-1.5b", {2048: 32}, 4, 2048),
    Scenario("1.5b rows of 512", "qwen2.5-1.5b", {512: 128}, 4, 2048),
    Scenario("7b adapter rows of 1024", "qwen2.5-7b", {1024: 32}, 4, 1024, _ADAPTER),
    Scenario("7b adapter rows of 2048", "qwen2.5-7b", {2048: 16}, 4, 2048, _ADAPTER),
    Scenario("7b adapter rows of 512", "qwen2.5-7b", {512: 64}, 2, 2048, _ADAPTER),
    Scenario("0.5b pairs", "qwen2.5-0.5b", {512: 64}, 8, 1024, trainer="dpo"),
    Scenario("0.5b labelled answers", "qwen2.5-0.5b", {512: 64}, 8, 1024, trainer="kto"),
    Scenario("0.5b ranked pairs", "qwen2.5-0.5b", {512: 64}, 8, 1024, trainer="reward"),
    Scenario("0.5b prompts", "qwen2.5-0.5b", {256: 64}, 16, None, _SHORT_COMPLETIONS, "grpo"),
    Scenario("0.5b prompts, leave one out", "qwen2.5-0.5b", {256: 64}, 16, None, _SHORT_COMPLETIONS, "rloo"),
    Scenario("0.5b prompts, answers in pairs", "qwen2.5-0.5b", {256: 64}, 8, None, _SHORT_ANSWERS, "online_dpo"),
    Scenario("0.5b rows of 16384", "qwen2.5-0.5b", {16384: 8}, 2, 16384),
    Scenario("0.5b rows and a long one", "qwen2.5-0.5b", {300: 63, 6000: 1}, 8, 6000),
    Scenario("1.5b pairs and a long one", "qwen2.5-1.5b", {300: 63, 3000: 1}, 8, 3000, trainer="dpo"),
    Scenario("llama 1b rows of 1024", "llama-3.2-1b", {1024: 64}, 8, 1024),
    Scenario("qwen3 0.6b rows of 1024", "qwen3-0.6b", {1024: 64}, 16, 1024),
    Scenario("gemma 3 1b rows of 1024", "gemma-3-1b", {1024: 64}, 8, 1024),
    Scenario("smollm2 135m rows of 512", "smollm2-135m", {512: 128}, 32, 1024),
    Scenario("olmoe adapter rows of 1024", "olmoe-1b-7b", {1024: 32}, 4, 1024, _ADAPTER),
    Scenario("0.5b prompts, a 1.5b teacher", "qwen2.5-0.5b", {256: 64}, 8, None, {"max_completion_length": 64},
             "distillation", teacher="qwen2.5-1.5b"),
    Scenario("qwen2.5-vl 3b adapter rows with images", "qwen2.5-vl-3b", {256: 32}, 4, 2048, _ADAPTER, pixels=_PIXELS),
    Scenario("qwen2.5-vl 3b adapter pairs with images", "qwen2.5-vl-3b", {256: 32}, 4, 2048, _ADAPTER, "dpo",
             pixels=_PIXELS),
    Scenario("gemma 3 4b adapter rows with images", "gemma-3-4b", {256: 32}, 4, 2048, _ADAPTER, pixels=_PIXELS),
)  # fmt: skip
"""The scenarios. Slower steps have fewer rows, so that a probe takes seconds."""


def _cases(scenario: str, *choices: tuple[int, Mapping[str, Choice]], limit_bytes: int | None = None) -> list[Case]:
    """Return cases of a scenario, from pairs of rows in a micro-batch and other choices."""
    return [
        Case(scenario, Candidate({"per_device_train_batch_size": rows, **others}), limit_bytes)
        for rows, others in choices
    ]


_BY_SCENARIO = (
    _cases(
        "0.5b rows of 1024",
        (8, {}),
        (4, {**_NO_CHECKPOINTING, "activation_offloading": "on"}),
        (4, _NO_CHECKPOINTING),
        (8, {**_NO_CHECKPOINTING, "liger": "on"}),
        (16, {}),
        (1, {}),
        (2, {**_NO_CHECKPOINTING, "precision": "bfloat16"}),
        (4, {"optimizer": "adamw_bnb_8bit"}),
        (8, _NO_CHECKPOINTING),
        (8, {"liger": "on"}),
        (4, {"gradient_checkpointing": "selective"}),
        (2, {"attention": "eager"}),
        (4, {"optimizer": "adamw_torch"}),
        (4, {"optimizer": "adafactor"}),
        (8, {**_NO_CHECKPOINTING, "lora": "r16"}),
        (16, {**_NO_CHECKPOINTING, "optimizer": "sgd"}),
        (4, {"gradient_checkpointing": "every_2"}),
        (4, {"gradient_checkpointing": "offload"}),
        (2, {**_NO_CHECKPOINTING, "precision": "float32"}),
        (8, {"activation_offloading": "on"}),
        (4, {**_NO_CHECKPOINTING, "attention": "flex_attention"}),
    ),
    _cases("0.5b rows of 4096", (1, _NO_CHECKPOINTING), (4, {}), (2, {**_NO_CHECKPOINTING, "liger": "on"}), (1, {})),
    _cases(
        "0.5b rows of 256",
        (4, {**_NO_CHECKPOINTING, "packing": "bfd"}),
        (8, {"packing": "bfd"}),
        (16, {**_NO_CHECKPOINTING, "padding_free": "on"}),
        (2, {**_NO_CHECKPOINTING, "packing": "bfd", "liger": "on"}),
        (8, {"packing": "wrapped"}),
    ),
    _cases("0.5b padded rows", (4, _NO_CHECKPOINTING), (8, {}), (16, {**_NO_CHECKPOINTING, "liger": "on"})),
    _cases(
        "1.5b rows of 1024",
        (8, {}),
        (4, {**_NO_CHECKPOINTING, "activation_offloading": "on"}),
        (2, _NO_CHECKPOINTING),
        (4, {**_NO_CHECKPOINTING, "liger": "on"}),
        (4, {**_NO_CHECKPOINTING, "optimizer": "adamw_bnb_8bit"}),
        (4, {**_NO_CHECKPOINTING, "precision": "bfloat16"}),
        (1, {}),
        (8, {**_NO_CHECKPOINTING, "lora": "r16"}),
        (4, _NO_CHECKPOINTING),
    ),
    _cases("1.5b rows of 2048", (1, _NO_CHECKPOINTING), (4, {}), (2, {**_NO_CHECKPOINTING, "liger": "on"})),
    _cases("1.5b rows of 512", (2, {"packing": "bfd"}), (1, {**_NO_CHECKPOINTING, "packing": "bfd"})),
    _cases(
        "7b adapter rows of 1024",
        (4, {}),
        (4, {"quantization": "4bit-nf4"}),
        (2, _NO_CHECKPOINTING),
        (2, {**_NO_CHECKPOINTING, "quantization": "4bit-nf4"}),
        (1, _NO_CHECKPOINTING),
        (2, {**_NO_CHECKPOINTING, "activation_offloading": "on"}),
        (4, {"liger": "on"}),
        (1, {"quantization": "4bit-nf4"}),
        (2, {**_NO_CHECKPOINTING, "lora": "r16-attention"}),
        (2, {"lora": "r64"}),
        (2, {"quantization": "8bit"}),
        (1, {}),
        (4, {"quantization": "8bit"}),
        (1, {**_NO_CHECKPOINTING, "quantization": "8bit"}),
    ),
    _cases(
        "7b adapter rows of 2048",
        (1, _NO_CHECKPOINTING),
        (4, {"quantization": "4bit-nf4"}),
        (2, {**_NO_CHECKPOINTING, "liger": "on"}),
    ),
    _cases("7b adapter rows of 512", (1, {"packing": "bfd"}), (1, {**_NO_CHECKPOINTING, "packing": "bfd"})),
    _cases("0.5b pairs", (4, {}), (2, {**_NO_CHECKPOINTING, "liger": "on"}), (2, {"reference": "precomputed"})),
    _cases("0.5b labelled answers", (4, {}), (2, {**_NO_CHECKPOINTING, "activation_offloading": "on"})),
    _cases("0.5b ranked pairs", (4, {}), (8, _NO_CHECKPOINTING)),
    _cases("0.5b prompts", (16, {}), (4, {"liger": "on"}), (8, {"lora": "r16"})),
    _cases("0.5b prompts, leave one out", (8, {}), (4, _NO_CHECKPOINTING)),
    _cases("0.5b prompts, answers in pairs", (4, {}), (2, _NO_CHECKPOINTING)),
    _cases("0.5b rows of 16384", (1, {}), (1, {**_NO_CHECKPOINTING, "liger": "on"}), (2, {"liger": "on"})),
    _cases(
        "0.5b rows and a long one", (4, {}), (2, _NO_CHECKPOINTING), (8, {"liger": "on"}), (4, {"padding_free": "on"})
    ),
    _cases("1.5b pairs and a long one", (2, {}), (4, {"liger": "on"}), (4, {"lora": "r16"})),
    _cases(
        "llama 1b rows of 1024",
        (8, {}),
        (4, _NO_CHECKPOINTING),
        (4, {**_NO_CHECKPOINTING, "activation_offloading": "on"}),
        (8, {**_NO_CHECKPOINTING, "liger": "on"}),
        (8, {**_NO_CHECKPOINTING, "lora": "r16"}),
    ),
    _cases("qwen3 0.6b rows of 1024", (4, _NO_CHECKPOINTING), (8, {}), (8, {"liger": "on"})),
    _cases("gemma 3 1b rows of 1024", (2, _NO_CHECKPOINTING), (4, {}), (4, {"liger": "on"})),
    _cases("smollm2 135m rows of 512", (32, {}), (8, _NO_CHECKPOINTING), (4, {**_NO_CHECKPOINTING, "packing": "bfd"})),
    _cases("olmoe adapter rows of 1024", (4, {}), (1, _NO_CHECKPOINTING)),
    _cases("0.5b prompts, a 1.5b teacher", (8, {}), (4, _NO_CHECKPOINTING)),
    _cases("qwen2.5-vl 3b adapter rows with images", (2, {}), (1, _NO_CHECKPOINTING), (4, {"liger": "on"})),
    _cases("qwen2.5-vl 3b adapter pairs with images", (2, {}), (1, _NO_CHECKPOINTING)),
    _cases("gemma 3 4b adapter rows with images", (2, {}), (1, _NO_CHECKPOINTING)),
    # Cases that do not fit, or barely fit.
    _cases("0.5b rows of 1024", (8, _NO_CHECKPOINTING), (4, _NO_CHECKPOINTING), limit_bytes=20 * GIB),
    _cases("1.5b rows of 1024", (8, {}), (4, _NO_CHECKPOINTING), limit_bytes=24 * GIB),
    _cases("7b adapter rows of 1024", (2, _NO_CHECKPOINTING), (4, {}), limit_bytes=24 * GIB),
)


def spread(groups: Iterable[Iterable[Case]]) -> tuple[Case, ...]:
    """Return the cases so that each group has its turn, one case at a time."""
    turns = itertools.zip_longest(*groups)
    return tuple(case for turn in turns for case in turn if case is not None)


CASES = spread(_BY_SCENARIO)
"""Every configuration, in the order in which they are run."""
