"""``lora``: small trained adapters on a frozen model."""

from __future__ import annotations

import re
from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.core.workload import ModelProfile
from autotune.techniques.base import Effect, Option, Technique
from autotune.techniques.reference import SYNCHRONISED
from autotune.techniques.trace_impact import PlanImpact, TraceImpact

NONE = "none"
LANGUAGE_MODEL = r"(.*\.)?(language|text)_model\..*"
"""Pattern of the names of a vision-language model's language model, in transformers' modeling files."""
_GRAMMAR = re.compile(
    r"r(?P<rank>[1-9]\d*)(?P<language>-language)?(?P<attention>-attention)?(?P<rslora>-rslora)?(?P<dora>-dora)?"
)
# Names of the attention projections in transformers' modeling files.
_ATTENTION_MODULES = frozenset(
    {
        "q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv",
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "query", "key", "value", "query_proj", "key_proj",
        "value_proj",
    }
)  # fmt: skip
WITH_NEW_HEAD = frozenset({"reward"})
"""Trainers whose model has a score head, which PEFT trains fully; others have an LM head, which TRL fuses."""
# Suffixes of PEFT's keys that hold module names or regular expressions of them.
_KEYS_OF_NAMES = ("modules", "parameters", "pattern", "to_save")
# A name with a layer's number, such as `layers.31.self_attn.q_proj`, or a regular expression for some numbers,
# such as `layers\.\d5\.`; `\d+` stands for any layer.
_LAYER_NUMBER = re.compile(r"\b\d|\\d(?![+*])")
# TRL's default alpha is 32 for its default rank of 16 (trl.ModelConfig).
_ALPHA_PER_RANK = 2


def has_adapters(candidate: Candidate) -> bool:
    """Return whether a candidate trains adapters on a frozen model, by ``lora`` or by ``peft_config``."""
    return candidate["lora"] != NONE or candidate.get("peft_config", NONE) != NONE


def adapts_layers(entries: Mapping[str, object]) -> PlanImpact:
    """Return the effect of an adapter's keys on the extrapolation: some select layers by number.

    PEFT matches full names, which contain the layer number (``tuners_utils.py``, ``check_target_module_exists``), and
    has keys for layers, such as ``layers_to_transform``, ``layer_replication`` and ``num_layers``.
    """
    for key, value in entries.items():
        names = value if isinstance(value, (list, tuple, set, dict)) else [value]
        named = key.endswith(_KEYS_OF_NAMES) and any(_LAYER_NUMBER.search(str(name)) for name in names)
        if named or ("layer" in key and value not in (None, "", [])):
            return PlanImpact(needs_all_layers=True)
    return PlanImpact()


def trains_whole_modules(setting: Setting) -> bool:
    """Return whether modules are fully trained in addition to adapters: a new head, or modules that the user names.

    PEFT trains a copy of each (``ModulesToSaveWrapper``) in the type of the model's weights, while adapters are in
    float32 (``cast_adapter_dtype``).
    """
    return setting.workload.trainer in WITH_NEW_HEAD or bool(setting.users_entry("model.lora_modules_to_save"))


class Lora(Technique):
    """LoRA by PEFT, set through the fields of ``trl.ModelConfig``."""

    summary = "Trains LoRA adapters; the frozen model has no gradients and no optimizer state."
    options = (
        Option(NONE, "all weights are trained"),
        Option("r16", "rank 16 (rN) on all linear modules", Effect.CHANGES_TRAINING, family=_GRAMMAR),
        Option("r64", "rank 64 on all linear modules", Effect.CHANGES_TRAINING),
        Option("r16-attention", "on the attention projections only", Effect.CHANGES_TRAINING),
        Option("r16-language", "on the language model only, not on its vision tower", Effect.CHANGES_TRAINING),
        Option("r16-rslora", "scaled by the root of the rank", Effect.CHANGES_TRAINING),
        Option("r16-dora", "with trained magnitudes (DoRA)", Effect.CHANGES_TRAINING),
    )
    needs = "for rN-language, a vision tower and no fused experts; for rN-dora, no fused experts"
    changes = "only the adapters are trained"
    writes = frozenset(f"model.lora_{name}" for name in ("task_type", "r", "alpha", "dropout", "target_modules")) | {
        "model.use_peft", "model.use_rslora", "model.use_dora",
    }  # fmt: skip
    impact = TraceImpact(patches_libraries=False, in_plan=lambda plan: adapts_layers(plan.model))

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason for missing targets, and for DoRA on fused experts (PEFT's ``ParamWrapper`` has none).

        For fused experts, PEFT splits the language model's names into suffixes that match the vision tower too
        (``_resolve_string_target_modules``).
        """
        match, model = _GRAMMAR.fullmatch(str(choice)), setting.workload.model
        if match and match["dora"] and not match["attention"] and model.fused_experts:
            instead = f"r{match['rank']}-attention-dora"
            return f"PEFT has no DoRA for experts whose weights are one parameter; {instead} does not adapt them"
        if match and match["language"] and not model.language_modules:
            return "this model has no vision tower with a separate language model"
        if match and match["language"] and model.fused_experts:
            return "PEFT trains the vision tower too, since the weights of all experts are one parameter"
        if match and match["attention"] and not _modules(match, model):
            names = ", ".join(model.linear_modules)
            return f"none of this model's linear modules ({names}) is known as a projection of attention"
        return None

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if the user's configuration synchronises the reference, which with adapters is no copy."""
        if has_adapters(candidate) and setting.users_entry(SYNCHRONISED):
            return "TRL refuses adapters with sync_ref_model: the reference is the model without its adapters"
        return None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        match = _GRAMMAR.fullmatch(str(choice))
        if match is None:
            return {"model.use_peft": has_adapters(candidate)}
        rank = int(match["rank"])
        entries: dict[str, object] = {
            "model.use_peft": True,
            "model.lora_r": rank,
            "model.lora_alpha": _ALPHA_PER_RANK * rank,
            "model.lora_target_modules": _targets(match, setting.workload.model),
        }
        if setting.workload.model.fused_experts and not match["attention"]:
            # PEFT's ParamWrapper refuses any other, and TRL's default is 0.05.
            entries["model.lora_dropout"] = 0.0
        if match["rslora"]:
            entries["model.use_rslora"] = True
        if match["dora"]:
            entries["model.use_dora"] = True
        return entries


def _targets(match: re.Match[str], model: ModelProfile) -> list[str] | str:
    modules = _modules(match, model)
    if match["language"]:
        return rf"{LANGUAGE_MODEL}\.({'|'.join(modules)})"
    if not match["attention"]:
        return "all-linear"
    # TRL's ModelConfig turns a list of one into a string, which PEFT treats as a regular expression on a module's full
    # name. With no known module it matches none.
    return modules if len(modules) > 1 else rf".*\.({'|'.join(modules)})"


def _modules(match: re.Match[str], model: ModelProfile) -> list[str]:
    names = set(model.language_modules if match["language"] else model.linear_modules)
    return sorted(names & _ATTENTION_MODULES if match["attention"] else names)
