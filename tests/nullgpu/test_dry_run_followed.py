"""What counts as a step of a script, and which line of it is named; PyTorch runs on the CPU here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from autotune.nullgpu.hook.nullgpu_dry_run import FOLDER
from autotune.nullgpu.hook.nullgpu_dry_run.places import place
from tests.nullgpu.machine import ROOT

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


def test_a_script_is_ended_after_the_last_step_of_its_furthest_optimizer(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    (folder / "request.json").write_text(json.dumps({"steps": 4, "as_shuffled": False}))
    script = tmp_path / "train.py"
    script.write_text(dedent(SCRIPT))
    hook = ROOT / "autotune" / "nullgpu" / "hook"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path)],
        env={**os.environ, FOLDER: str(folder), "PYTHONPATH": str(hook)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(each.name for each in tmp_path.glob("[sb][te]*")) == ["step-0", "step-1", "step-2", "step-3"]
    assert {each.name for each in folder.iterdir()} == {"request.json", "stopped-0", "all-stopped"}


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
