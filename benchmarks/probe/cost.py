"""The cost of a probe, and its composed step time against that of whole steps.

python -m benchmarks.probe.cost [MODEL DATASET] [--parts start,batch,composed] [--rounds 5]

start: from request to first training step, in a forked process against a cold one.
batch: a probe's wall clock at a global batch of 8, 64 and 512 documents.
composed: the time of a step composed of two micro-batches of each step, over the wall clock of the same whole steps;
and a probe's tokens per second beside those of TRL's own trainer over whole steps, in other processes.

Without MODEL and DATASET it builds the small workload of the examples. What is compared takes turns, so that all see
the same machine; ratios are of medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.app.arguments import SearchArguments
from autotune.app.options import checked_options
from autotune.app.problem import problem_of
from autotune.app.requests import probe_request
from autotune.app.workload import WorkloadReader
from autotune.core.candidate import Choice
from autotune.core.effort import EFFORTS
from autotune.core.events import ignore
from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.machine import Machine
from autotune.core.measurement import Measurement
from autotune.core.workload import Workload
from autotune.inspection.dataset import dataset_source
from autotune.inspection.machine import machine as inspect_machine
from autotune.inspection.model import model_source
from autotune.probing import JobServer, probe
from autotune.trainers import DEFAULT
from benchmarks.probe.whole_steps import composed_over_whole, tokens_per_second
from benchmarks.shapes import small_workload

GLOBAL_BATCHES = (8, 64, 512)
_COMPOSED_BATCH = 32
_SEED = 42
_COMPOSED: Mapping[str, Mapping[str, Choice]] = {
    "TRL's default": {},
    "two rows, no checkpointing": {"per_device_train_batch_size": 2, "gradient_checkpointing": "off"},
    "four rows, float32": {"per_device_train_batch_size": 4, "precision": "float32"},
}
# Single micro-batches vary by 10 to 15 %, and two of each step are composed: so many keep chance below 2 %.
_STEPS_COMPOSED = 48
_STEPS_OF_TRL = 12


@dataclass(frozen=True)
class Prober:
    """Probes of one workload, each in a separate folder."""

    workload: Workload
    machine: Machine
    server: JobServer
    folder: Path

    def request(self, global_batch: int = 8, choices: Mapping[str, Choice] | None = None) -> ProbeRequest:
        """Return the request for a probe of TRL's default with some other choices."""
        options = checked_options(SearchArguments(trainer=DEFAULT, token_coverage=0.0))
        problem = problem_of(options, self.workload, self.machine, global_batch)
        candidate = problem.normal(problem.baseline.but(**(choices or {})))
        return probe_request(problem, candidate, EFFORTS["normal"].probe, None, _SEED)

    def run(self, request: ProbeRequest, server: JobServer | None = None) -> Measurement:
        """Return what a probe showed.

        Raises:
            SystemExit: it did not run to the end.
        """
        shown = probe(server or self.server, request, self.folder / f"probe-{len(list(self.folder.iterdir()))}")
        if not shown.ok:
            raise SystemExit(f"a probe failed: {shown.reason}")
        return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="as for `autotune probe`")
    parser.add_argument("dataset", nargs="?", help="as for `autotune probe`")
    parser.add_argument("--parts", default="start,batch,composed", help="which to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind (default: 5)")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="autotune-") as temporary:
        folder = Path(temporary)
        model, dataset = asked.model, asked.dataset
        if dataset is None:
            model, dataset = map(str, small_workload(folder / "small"))
        machine = inspect_machine("auto")
        with JobServer(machine.hardware.kind, threads=machine.hardware.threads) as server:
            prober = prepared(model, dataset, machine, server, folder)
            prober.run(prober.request())  # the first one fills the caches of datasets and of the disk
            print(f"{machine.hardware.name}, {asked.rounds} runs of each kind in turn, on {Path(dataset).name}")
            parts = {"start": start, "batch": batch, "composed": composed}
            for name in asked.parts.split(","):
                parts[name](prober, asked.rounds)
    return 0


def start(prober: Prober, rounds: int) -> None:
    """Print the times of a forked and of a cold process to their first training step."""
    request = prober.request()
    forked: list[Measurement] = []
    cold: list[Measurement] = []
    with JobServer(request.device, spawn=True) as spawning:
        for _ in range(rounds):
            forked.append(prober.run(request))
            cold.append(prober.run(request, spawning))
    starts = {name: median(shown, "start_seconds") for name, shown in (("forked", forked), ("cold", cold))}
    for name, seconds in starts.items():
        print(f"  {name:7} request to first training step: {seconds:6.2f} s")
    print(f"  ratio   cold / forked: {starts['cold'] / starts['forked']:.1f}")
    share = median(forked, "training_seconds") / median(forked, "wall_seconds")
    print(f"  share of a forked probe's wall time that is training steps: {share:.0%}")


def batch(prober: Prober, rounds: int) -> None:
    """Print the time of a probe of TRL's default at each global batch."""
    requests = {size: prober.request(size) for size in GLOBAL_BATCHES}
    shown: dict[int, list[Measurement]] = {size: [] for size in requests}
    for _ in range(rounds):
        for size, request in requests.items():
            shown[size].append(prober.run(request))
    least = median(shown[GLOBAL_BATCHES[0]], "wall_seconds")
    for size, found in shown.items():
        seconds, whole = median(found, "wall_seconds"), median(found, "step_seconds")
        print(f"  global batch {size:3}: a probe takes {seconds:6.2f} s ({seconds / least:.2f} times that of "
              f"{GLOBAL_BATCHES[0]}); a whole step would take {whole:.2f} s")  # fmt: skip


def composed(prober: Prober, rounds: int) -> None:
    """Print composed steps over whole ones, and the rates of probes and of TRL's own trainer."""
    for name, choices in _COMPOSED.items():
        request = prober.request(_COMPOSED_BATCH, choices)
        ratios: list[float] = []
        rates: list[float] = []
        whole: list[float] = []
        for _ in range(rounds):
            ratios.append(composed_over_whole(request, _STEPS_COMPOSED))
            rates.append(prober.run(request).tokens_per_second or 0.0)
            whole.append(tokens_per_second(request, _STEPS_OF_TRL))
        print(f"  {name}, global batch {_COMPOSED_BATCH}: composed over whole {_listed(ratios, 3)}; "
              f"probes {_listed(rates)} tok/s, TRL's trainer {_listed(whole)}")  # fmt: skip


def _listed(figures: Sequence[float], digits: int = 0) -> str:
    return f"{statistics.median(figures):,.{digits}f} ({min(figures):,.{digits}f} to {max(figures):,.{digits}f})"


def prepared(model: str, dataset: str, machine: Machine, server: JobServer, folder: Path) -> Prober:
    """Return a prober for a workload that has been read and tokenised."""
    reader = WorkloadReader(server, folder, ignore)
    workload = reader.read(DEFAULT, model_source(model, "random"), dataset_source(dataset))
    probes = folder / "probes"
    probes.mkdir()
    return Prober(workload, machine, server, probes)


def median(shown: Sequence[Measurement], figure: str) -> float:
    """Return the median of a figure over probes that all have it."""
    return float(statistics.median(getattr(item, figure) for item in shown))


if __name__ == "__main__":
    sys.exit(main())
