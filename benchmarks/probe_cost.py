"""What a probe costs beside training: from request to first training step, forked against a cold process.

python benchmarks/probe_cost.py [MODEL DATASET] [--rounds 5]

Without arguments it builds the small workload of the examples. Forked and cold probes take turns, so that both see the
same machine; the ratio is of their medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from autotune.core.candidate import Candidate
from autotune.core.machine import Machine
from autotune.core.measurement import Measurement, Schedule
from autotune.core.protocol import PrepareRequest, ProbeRequest
from autotune.core.setting import Setting
from autotune.core.workload import Workload
from autotune.inspection.dataset import dataset_source
from autotune.inspection.machine import machine as inspect_machine
from autotune.inspection.model import model_source
from autotune.probing import JobServer, prepare, probe
from autotune.trainers import TRAINERS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 0 when every probe ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="as for `autotune probe`")
    parser.add_argument("dataset", nargs="?", help="as for `autotune probe`")
    parser.add_argument("--rounds", type=int, default=5, help="probes of each kind (default: 5)")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="autotune-") as temporary:
        folder = Path(temporary)
        model, dataset = asked.model, asked.dataset
        if dataset is None:
            from small_workload import build

            model, dataset = map(str, build(folder / "small"))
        return compare(model, dataset, folder, asked.rounds)


def compare(model: str, dataset: str, folder: Path, rounds: int) -> int:
    """Run ``rounds`` probes of each kind in turn, print the comparison, and return 0 when all ran."""
    machine = inspect_machine("auto")
    device = machine.hardware.kind
    forked: list[Measurement] = []
    cold: list[Measurement] = []
    with JobServer(device) as forking, JobServer(device, spawn=True) as spawning:
        request = prepared(model, dataset, machine, forking, folder)
        probe(forking, request, folder / "first")  # the first one fills the caches of datasets and of the disk
        for turn in range(rounds):
            forked.append(probe(forking, request, folder / f"forked-{turn}"))
            cold.append(probe(spawning, request, folder / f"cold-{turn}"))
    failed = [shown.reason for shown in (*forked, *cold) if not shown.ok]
    if failed:
        print(f"{len(failed)} probes failed: {failed[0]}", file=sys.stderr)
        return 1
    print(f"{machine.hardware.name}, {rounds} probes of each kind in turn, TRL's default on {Path(dataset).name}")
    starts = {name: median(shown, "start_seconds") for name, shown in (("forked", forked), ("cold", cold))}
    for name, seconds in starts.items():
        print(f"  {name:7} request to first training step: {seconds:6.2f} s")
    print(f"  ratio   cold / forked: {starts['cold'] / starts['forked']:.1f}")
    share = median(forked, "training_seconds") / median(forked, "wall_seconds")
    print(f"  share of a forked probe's wall time that is training steps: {share:.0%}")
    return 0


def prepared(model: str, dataset: str, machine: Machine, server: JobServer, folder: Path) -> ProbeRequest:
    """Return the request for a probe of TRL's default."""
    source, rows = model_source(model, "random"), dataset_source(dataset)
    reply = prepare(server, PrepareRequest(source, rows, "sft", str(folder / "tokenized")), folder / "prepare")
    workload = Workload("sft", source, rows, reply.model, reply.dataset)
    setting = Setting(workload, machine, 8 * machine.hardware.processes, token_coverage=0.0)
    trainer = TRAINERS["sft"]
    baseline = Candidate({item.name: item.default(setting) for item in trainer.techniques})
    return ProbeRequest(
        plan=trainer.plan(baseline, setting),
        model=source,
        device=machine.hardware.kind,
        tokenized_directory=reply.dataset.tokenized_directory,
        schedule=Schedule(),
    )


def median(shown: Sequence[Measurement], figure: str) -> float:
    """Return the median of a figure over probes that all have it."""
    return float(statistics.median(getattr(item, figure) for item in shown))


if __name__ == "__main__":
    sys.exit(main())
