"""The first lines of the configurations that tests check: model, rows, and sizes that are traced quickly."""

from __future__ import annotations

from collections.abc import Mapping

HEAD = """\
# {name}
model_name_or_path: {model}
datasets:
  - path: json
    data_files: {rows}
output_dir: out
seed: 7
"""
# Completions as long as those of a real run would take minutes to trace at full length on a CPU.
SHORT = {
    "grpo": "max_completion_length: 24\nnum_generations: 4\nreward_funcs: [get_soft_overlong_punishment]\n",
    "rloo": "max_completion_length: 24\nnum_generations: 4\nreward_funcs: [get_soft_overlong_punishment]\n",
    "online_dpo": "max_new_tokens: 24\nreward_funcs: [get_soft_overlong_punishment]\n",
    "distillation": "max_completion_length: 24\nteacher_model_name_or_path: {model}\n",
}


def beginning(trainer: str, model: object, rows: object, short: Mapping[str, str] = SHORT) -> str:
    """Return the lines of a configuration above those of a case; a trainer's teacher is the model itself."""
    return (HEAD + short.get(trainer, "")).format(name=trainer, model=model, rows=rows)
