"""Searches from Python, then trains with TRL's own trainer and the recommended configuration for two steps.

    python examples/python_api.py [MODEL DATASET.jsonl] [--memory-budget 2GiB]

Without arguments it builds the small workload next to this file and uses that.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from small_workload import build

import autotune

SMALL = Path(__file__).parent / "build" / "small"


def main() -> None:
    """Find a configuration for the workload on the command line, and train two steps with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="*", metavar="MODEL DATASET.jsonl")
    parser.add_argument("--memory-budget", help="such as 24GiB; default: the free memory")
    parser.add_argument("--output", help="directory for the bundle")
    parser.add_argument("--trials", type=int, help="maximum number of probes")
    args = parser.parse_args()
    model, data = args.workload or small_workload()

    result = autotune.probe(
        model,
        data,
        memory_budget=args.memory_budget,
        effort="quick",
        trials=args.trials,
        output=args.output,
    )
    if result.recommended is None:
        raise SystemExit(f"nothing to train with: {result.status.value}")
    print(f"recommended: {dict(result.recommended.candidate)}")

    # The rest is a training script as in TRL's documentation.
    from trl import SFTTrainer

    os.environ.update(result.env)  # before the first use of the GPU
    config = result.config
    config.max_steps = 2
    trainer = SFTTrainer(
        model,
        args=config,
        peft_config=result.peft_config,
        quantization_config=result.quantization_config,
        train_dataset=result.train_dataset,
    )
    trainer.train()
    print(f"trained {trainer.state.global_step} steps")


def small_workload() -> tuple[str, str]:
    """Return the small workload, which is built if it is missing."""
    if not (SMALL / "data.jsonl").is_file():
        build(SMALL)
    return str(SMALL / "model"), str(SMALL / "data.jsonl")


if __name__ == "__main__":
    main()
