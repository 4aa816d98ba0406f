"""The fields of TRL's configuration classes, and of TrainingArguments, by release.

``tests/data/released_fields.json`` has for each field the first and the last release with it. It was recorded in
November 2026 from the wheels of the releases that it lists: the annotated names in the bodies of ``SFTConfig`` and so
on (``ast``; nothing was run), at ``trl/trainer/*_config.py`` or ``trl/experimental/*/*_config.py``; ``script`` is what
the class of script arguments had that ``trl sft``, ``trl dpo`` and so on used (``trl/commands/cli_utils.py``,
``trl/utils.py``, ``trl/scripts/utils.py``; ``sanity_check`` was that of ``trl dpo``). Names that are no arguments
(``_n_gpu``) are left out. To go on with a new release, add it to its list, set the last release of all fields
that it has, and add the fields that are new.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRAINERS = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "online_dpo")
SHARED = ("model", "script", "mixture", "transformers")
RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "released_fields.json").read_text())


def releases(section: str) -> list[str]:
    """Return the releases that were looked at, the oldest first."""
    found: list[str] = RECORDED["releases"]["transformers" if section == "transformers" else "TRL"]
    return found


def newest(section: str) -> set[str]:
    """Return the fields of a class in the newest release."""
    return {field for field, (_, last) in RECORDED["fields"][section].items() if last == releases(section)[-1]}


def removed() -> Iterator[tuple[str, str, str]]:
    """Yield section and name of every field that no class parsed by the same command has any more, and since when."""
    everywhere = set.intersection(*(newest(trainer) for trainer in TRAINERS)).union(*map(newest, SHARED))
    for section, fields in RECORDED["fields"].items():
        for field, (_, last) in fields.items():
            if field not in newest(section) | everywhere:
                known = releases(section)
                yield section, field, known[known.index(last) + 1]
