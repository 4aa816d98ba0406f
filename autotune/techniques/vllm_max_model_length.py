"""``vllm_max_model_length``: the longest sequence (prompt and completion) that vLLM's key-value cache must hold."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import POSITIVE, CrashReason, Option
from autotune.techniques.vllm import VllmSize, is_colocated, too_long_for_model

DATA = "data"
MODEL = "model"


class VllmMaxModelLength(VllmSize):
    """vLLM does not start unless its cache holds one such sequence, even if the dataset's are shorter."""

    summary = "Longest sequence of vLLM, whose key-value cache must hold at least one."
    options = (
        Option(DATA, "the longest prompt and max_completion_length together"),
        Option(MODEL, "the length in the model's configuration: TRL's default", entries={}),
        Option(4096, "any number of tokens", family=POSITIVE),
    )
    trl_default = MODEL

    def default(self, setting: Setting) -> Choice:
        """Return the length of the data: with TRL's default, a model made for 131,072 tokens needs a cache for them."""
        return DATA

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if vLLM would refuse the longest prompt, or the length."""
        if not is_colocated(candidate):
            return None
        wanted = _of_data(candidate, setting)
        length = {DATA: wanted, MODEL: setting.workload.model.max_positions}.get(str(choice), choice)
        if length is None:
            return None
        if int(length) < wanted:
            # vLLM ends completions at the length, and refuses prompts that reach it.
            kind = CrashReason if int(length) <= setting.workload.longest else str
            return kind(
                f"the longest prompt and its completion have {wanted:,} tokens together, and vLLM takes only "
                f"{int(length):,}"
            )
        return too_long_for_model(setting.workload.model, int(length))

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """Return the tokens; no entry for TRL's default, or if vLLM uses no part of this GPU."""
        tokens = _of_data(candidate, setting) if choice == DATA and is_colocated(candidate) else choice
        return super().plan(tokens, candidate, setting)


def _of_data(candidate: Candidate, setting: Setting) -> int:
    """Return the tokens of the longest prompt with the longest completion."""
    return setting.workload.longest + int(candidate["max_completion_length"])
