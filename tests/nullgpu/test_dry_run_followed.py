"""The recorder of a dry run: a script's steps, their lines, and the ends of completions; on the CPU here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from autotune.nullgpu.hook.nullgpu_dry_run import FOLDER
from autotune.nullgpu.hook.nullgpu_dry_run.completions import stagger_completions
from autotune.nullgpu.hook.nullgpu_dry_run.places import place
from tests.nullgpu.machine import ROOT
from tests.small import VOCABULARY, small_config

# Optimizers that take steps at different times, one whose step calls its base's, and one step that fails.
SCRIPT = """
    import sys, torch
    from pathlib import Path
    weight = torch.nn.Parameter(torch.ones(4))
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)
    often, seldom = Own([weight], lr=0.1), torch.optim.AdamW([weight])
    for number in range(9):
        Path(sys.argv[1], f"step-{number}").touch()
        weight.sum().backward()
        often.step()
        if number % 2:
            seldom.step()
    Path(sys.argv[1], "behind").touch()
"""


# A loader of its own class, as torchdata's is, a worker that fails, and tracebacks of a library.
BROKEN = """
    import sys, torch
    from torch.utils.data import DataLoader, Dataset, get_worker_info
    class Rows(Dataset):
        def __len__(self):
            return 3
        def __getitem__(self, index):
            if get_worker_info() is not None:
                raise ValueError(f"row {index} is broken")
            return torch.ones((1, 3, 2)[index])
    class Own(DataLoader):
        def __iter__(self):
            return self._get_iterator()
    sys.excepthook = lambda *_: None
    next(iter(Own(Rows(), num_workers=1)))
"""


def followed(tmp_path: Path, script: str, steps: int) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run a script that is followed; return how it ended, and the folder of its records."""
    folder, file = tmp_path / "records", tmp_path / "train.py"
    folder.mkdir()
    (folder / "request.json").write_text(json.dumps({"steps": steps, "as_shuffled": False}))
    file.write_text(dedent(script))
    hook = ROOT / "autotune" / "nullgpu" / "hook"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(file), str(tmp_path)],
        env={**os.environ, FOLDER: str(folder), "PYTHONPATH": str(hook)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, folder


def test_a_script_is_ended_after_the_last_step_of_its_furthest_optimizer(tmp_path: Path) -> None:
    done, folder = followed(tmp_path, SCRIPT, steps=4)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(each.name for each in tmp_path.glob("[sb][te]*")) == ["step-0", "step-1", "step-2", "step-3"]
    assert {each.name for each in folder.iterdir()} == {"request.json", "stopped-0", "all-stopped"}


def test_a_loader_of_its_own_class_is_ordered_and_the_error_of_its_worker_is_named(tmp_path: Path) -> None:
    done, folder = followed(tmp_path, BROKEN, steps=3)
    assert done.returncode == 1
    (file,) = folder.glob("process-*.json")
    record = json.loads(file.read_text())
    assert [(each["order"], each["largest"]) for each in record["loaders"]] == [("largest first", 3)]
    assert record["error"]["message"] == "row 1 is broken"


def test_the_deepest_line_of_the_user_s_own_is_named_and_the_library_s_below_it(tmp_path: Path) -> None:
    own = tmp_path / "train.py"
    own.write_text("first\nmodel(batch)\n")
    packages = "venv/lib/python3.12/site-packages"
    found = place(
        [
            (str(own), 1, "<module>"),
            (f"/{packages}/transformers/trainer.py", 10, "train"),
            (str(own), 2, "compute_loss"),
            (f"/{packages}/transformers/models/llama/modeling_llama.py", 20, "forward"),
            (f"/{packages}/torch/nn/functional.py", 30, "linear"),
            ("<string>", 1, "wrapped"),
        ]
    )
    assert found == {
        "file": str(own),
        "line": 2,
        "function": "compute_loss",
        "text": "model(batch)",
        "within": "transformers/models/llama/modeling_llama.py:20, in forward",
    }


def test_without_a_file_of_the_user_s_own_a_library_s_is_named() -> None:
    found = place([(json.__file__, 1, "loads"), ("/venv/site-packages/trl/scripts/sft.py", 5, "main")])
    assert (found["file"], found["within"]) == ("", "trl/scripts/sft.py:5, in main")


END = 1


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Completions of three prompts of two tokens, in a process where a dry run ends them."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation import GenerationMixin

    # Put back after the test.
    monkeypatch.setattr(GenerationMixin, "_get_stopping_criteria", GenerationMixin._get_stopping_criteria)
    stagger_completions()
    model = AutoModelForCausalLM.from_config(small_config())

    def completions(ends: int | Sequence[int] | None = END, **kwargs: Any) -> list[list[int]]:
        model.generation_config.eos_token_id = ends
        prompts = torch.full((3, 2), 7)
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), pad_token_id=0, **kwargs)
        rows: list[list[int]] = ids[:, 2:].tolist()
        return rows

    return completions


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_first_completion_has_full_length_and_the_others_are_a_token_shorter(
    generate: Any, *, do_sample: bool
) -> None:
    first, *others = generate(max_new_tokens=5, do_sample=do_sample)
    assert END not in first[:4]
    assert [row.index(END) for row in others] == [3, 3]
    assert [row[4] for row in others] == [0, 0]


def test_a_completion_does_not_end_earlier_though_the_token_that_is_drawn_ends_it(generate: Any) -> None:
    first, *others = generate(ends=list(range(1, VOCABULARY)), max_new_tokens=4)
    assert first[:3] == [0, 0, 0]
    assert [row[:2] for row in others] == [[0, 0], [0, 0]]


@pytest.mark.parametrize("settings", [{"min_new_tokens": 5}, {"ends": None}, {"num_beams": 2}])
def test_completions_that_cannot_end_earlier_have_full_length(generate: Any, settings: dict[str, Any]) -> None:
    rows = generate(max_new_tokens=5, do_sample=False, **settings)
    assert [len(row) for row in rows] == [5, 5, 5]
    assert "num_beams" in settings or all(END not in row[:4] for row in rows)


def test_a_completion_of_one_token_is_as_long_as_the_others(generate: Any) -> None:
    assert [len(row) for row in generate(max_new_tokens=1)] == [1, 1, 1]
