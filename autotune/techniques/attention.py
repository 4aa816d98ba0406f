"""``attention``: which implementation computes attention."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.gpu import AMPERE
from autotune.core.machine import Hardware, Machine
from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import rounded_up
from autotune.core.setting import Setting
from autotune.core.workload import Workload
from autotune.techniques.base import ON, CrashReason, Option, Technique
from autotune.techniques.packing import EVALUATION_PACKED, NONE
from autotune.techniques.pad_to_multiple_of import multiple_of
from autotune.techniques.trace_impact import NO_PATCHES
from autotune.techniques.versions import missing

SDPA = "sdpa"
EAGER = "eager"
FLEX = "flex_attention"
UNEVEN_IMAGES = (
    "it stores the scores of each image, so one large image may need more than the micro-batches that run, which have "
    "the most image data in total"
)
"""Reason why memory with eager attention may be higher than measured or predicted; see :func:`uneven_images`."""
_PAGED = "kernels-community/paged-attention"
_DECODED = 128
"""Least number of queries for FlexAttention's usual kernel; also the block size of its mask."""


# Compute capabilities from FlashAttention's README (2: Ampere and later; 3: only Hopper, see its issues 1785, 1853 and
# 1889; 4: Hopper and Blackwell).
_HOPPER = (9, 0), (9, 9)
_FLASH: Mapping[Choice, tuple[str, str, tuple[int, int], tuple[int, int] | None]] = {
    "flash_attention_2": ("flash-attn", "kernels-community/flash-attn2", AMPERE, None),
    "flash_attention_3": ("flash-attn-3", "kernels-community/vllm-flash-attn3", *_HOPPER),
    "flash_attention_4": ("flash-attn-4", "kernels-community/flash-attn4", (9, 0), None),
    "kernels-community/flash-attn2": ("kernels", "", AMPERE, None),
    "kernels-community/flash-attn3": ("kernels", "", *_HOPPER),
    "kernels-community/vllm-flash-attn3": ("kernels", "", *_HOPPER),
    "kernels-community/flash-attn4": ("kernels", "", (9, 0), None),
}
"""The distribution that each FlashAttention needs; the kernel of the Hub that transformers falls back to without it
(``FLASH_ATTN_KERNEL_FALLBACK``); and the lowest and the highest CUDA compute capability, None without one."""


def unmasked_may_need_more(plan: TrainingPlan, capability: tuple[int, int] | None, *, grouped: bool) -> bool:
    """Whether attention may need more memory in a micro-batch without padding, and so without a mask, than in others.

    Without a mask, transformers passes grouped heads to sdpa unrepeated (``use_gqa_in_sdpa``). Only PyTorch's
    FlashAttention and cuDNN kernels take these, and neither runs in float32 or before compute capability 8.0; the
    fallback of plain products stores all scores. KTO of a small Llama in float32 allocated 9.3 GiB on a null GPU for
    rows of 4,176 tokens (PyTorch 2.13); traced with one shorter row, it had 2.9 GiB.

    Args:
        capability: the GPU's compute capability; None: unknown, and 8.0 or higher, as in a trace.
        grouped: whether several heads of queries share a head of keys and values.
    """
    old = capability is not None and capability < AMPERE
    halved = any(plan.args.get(name) for name in ("bf16", "fp16")) or plan.model.get("dtype") in ("bfloat16", "float16")
    return grouped and plan.model.get("attn_implementation") == SDPA and (old or not halved)


class Attention(Technique):
    """The implementation that ``attn_implementation`` names."""

    summary = "Chooses the attention kernel; fused kernels do not store the attention scores."
    options = (
        Option(EAGER, "plain matrix products; stores the matrix of scores"),
        Option(SDPA, "PyTorch's fused attention; a packed row needs a mask of tokens by tokens"),
        Option(FLEX, "PyTorch's compiled attention with block masks"),
        Option("flash_attention_2", "FlashAttention 2"),
        Option("flash_attention_3", "FlashAttention 3"),
        Option("flash_attention_4", "FlashAttention 4"),
        Option("kernels-community/flash-attn2", "FlashAttention 2 from the Hub"),
        Option("kernels-community/flash-attn3", "FlashAttention 3 from the Hub"),
        Option("kernels-community/vllm-flash-attn3", "FlashAttention 3 from the Hub, as vLLM builds it"),
        Option("kernels-community/flash-attn4", "FlashAttention 4 from the Hub"),
        Option(_PAGED, "attention over a paged cache from the Hub: generation only"),
    )
    trl_default = SDPA
    needs = "for flash, its package or kernels and a GPU of its generation; for flex, a GPU"
    writes = frozenset({"model.attn_implementation"})
    impact = NO_PATCHES

    def default(self, setting: Setting) -> Choice:
        """Return sdpa, or eager if the architecture has no sdpa, as transformers does by default."""
        check = setting.workload.packing_checks.get(SDPA)
        return EAGER if check is not None and not check.supported else SDPA

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return a reason if the GPU generation or the package that a fused kernel needs is missing."""
        if choice == _PAGED:
            return "it reads a paged cache, has no backward pass, and transformers' continuous batching refuses it"
        lacking = _lacking_gpu(choice, machine.hardware)
        if lacking is not None or choice not in _FLASH:
            return lacking
        distribution, fallback, *_ = _FLASH[choice]
        absent = missing(distribution, machine)
        if absent is None:
            return None
        if not fallback or missing("kernels", machine) is not None:
            return CrashReason(absent)
        return f"{absent}, and transformers would use {fallback}, which is a separate choice"

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason if the architecture does not support it, or if its worst row may not be among those run."""
        check = setting.workload.packing_checks.get(str(choice))
        if check is not None and not check.supported:
            return f"{setting.workload.model.model_type} does not run with attention={choice}: {check.reason}"
        model = setting.workload.model
        if any(kind in str(choice) for kind in model.lacks_attention):
            return f"transformers has no attention={choice} for {model.model_type}"
        own = self.name in setting.fixed or setting.is_users_choice(self.name, choice)
        if choice == EAGER and not own and self.default(setting) != EAGER and uneven_images(setting.workload):
            return UNEVEN_IMAGES
        return _mask_ignored(choice, setting)

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason for a device without the kernel, and for FlashAttention in float32 or with a mask of images.

        A missing package is a reason only on this machine, whose ``host_bytes`` are known: another planned machine may
        have it. FlexAttention fails on micro-batches of certain widths; see :func:`_failing_width`.
        """
        hardware = setting.machine.hardware
        if hardware.kind == "cpu" or hardware.compute_capability is not None:
            lacking = _lacking_gpu(choice, hardware)
            if lacking is not None:
                return CrashReason(lacking)
        if setting.machine.host_bytes is not None and (absent := self.unavailable(choice, setting.machine)) is not None:
            return absent
        failing = _failing_width(candidate, setting) if choice == FLEX else None
        if failing is not None:
            return CrashReason(
                f"the kernel of {FLEX} for fewer than {_DECODED} tokens fails if {_heads_per_key(setting)} heads share"
                f" keys and values: at {failing} tokens, which a micro-batch may have"
            )
        if choice in _FLASH and candidate["precision"] == "float32":
            return f"{choice} computes in bf16 or fp16 only, unlike precision=float32"
        return _mask_ignored(choice, setting)


def _lacking_gpu(choice: Choice, hardware: Hardware) -> str | None:
    """Return why a kernel does not run on a device, with any software; None if it does."""
    if choice == FLEX and hardware.kind == "cpu":
        return "flex_attention has no backward pass on a CPU"
    if choice not in _FLASH:
        return None
    if hardware.kind == "cpu":
        return "FlashAttention needs a CUDA GPU"
    *_, lowest, highest = _FLASH[choice]
    capability = hardware.compute_capability or (0, 0)
    if capability < lowest:
        return f"it needs a GPU of compute capability {lowest[0]}.{lowest[1]} or later"
    if highest is not None and capability > highest:
        return f"it has no kernels for GPUs of compute capability {capability[0]}.{capability[1]}"
    return None


def uneven_images(workload: Workload) -> bool:
    """Return whether images of different sizes always share a row or a block of successive rows.

    Qwen's vision towers attend within each image (``Qwen2_5_VLVisionAttention.forward``), so that scores grow with the
    square of its size: one large image may need more than several images with more data in total.
    """
    found = [(each.images, each.documents.order) for each in workload.profiles if each.images is not None]
    return any(
        (images.in_row.longest > 1 or order is not None) and len(images.pixels.counts) > 1 for images, order in found
    )


def _mask_ignored(choice: Choice, setting: Setting) -> str | None:
    """Return a reason if FlashAttention would train images with another mask than the model's.

    ``flash_attention_mask`` of ``transformers/masking_utils.py`` ignores the mask function.
    """
    workload = setting.workload
    if choice not in _FLASH or not workload.has_images or not workload.model.bidirectional_images:
        return None
    return f"tokens of an image attend to one another in {workload.model.model_type}, which FlashAttention ignores"


def _heads_per_key(setting: Setting) -> int:
    """Return the number of query heads per head of keys and values in the kernel."""
    model = setting.workload.model
    heads = model.attention_heads or 1
    # transformers repeats keys and values if the number of query heads is no power of two.
    if not model.grouped_heads or model.cache is None or heads & (heads - 1):
        return 1
    return heads // model.cache.heads


def _failing_width(candidate: Candidate, setting: Setting) -> int | None:
    """Return the smallest width in tokens of a micro-batch with which FlexAttention fails, or None without one.

    For fewer than 128 queries, Inductor uses a kernel that puts the queries of all heads with shared keys into one
    block. A block above 128, the mask's block size, leaves no valid kernel ("NoValidChoicesError", in
    ``create_flex_decoding_kernel`` of ``torch/_inductor/kernel/flex/flex_decoding.py``).
    """
    shared = _heads_per_key(setting)
    if shared == 1 or candidate.get("padding_free") == ON:
        return None
    trains_packed = candidate.get("packing", NONE) != NONE
    evaluates_packed = setting.users_entry(EVALUATION_PACKED)
    packed = trains_packed, trains_packed if evaluates_packed is None else evaluates_packed
    sizes = "per_device_train_batch_size", "per_device_eval_batch_size"
    for documents, size, in_packed_rows in zip(setting.workload.documents, sizes, packed, strict=False):
        # Completions of one prompt are generated together.
        together = min(documents.rows, max(1, int(candidate[size]) // int(candidate.get("num_generations", 1))))
        seen = 0
        for width, count in documents.widths.items() if not in_packed_rows else ():
            cut = min(width, int(candidate.get("max_length", width)))
            seen, padded = seen + count, rounded_up(cut, multiple_of(candidate))
            if seen >= together and padded * shared > _DECODED and padded < _DECODED:
                return padded
    return None
