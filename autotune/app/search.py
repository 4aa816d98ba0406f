"""Runs the search of a problem on this worker, and identifies its study."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from autotune.app.arguments import ProbeArguments
from autotune.app.output import Output
from autotune.app.problem import with_last_resorts
from autotune.app.requests import probe_request
from autotune.core.effort import EFFORTS, Effort
from autotune.core.events import Listener, StageStarted
from autotune.core.files.codec import encode
from autotune.core.machine import Hardware, Share
from autotune.core.measurement import Measurement
from autotune.core.prediction import Predictor
from autotune.inspection.machine import environment
from autotune.planning.tracing.cache import package_digest
from autotune.probing import JobServer
from autotune.probing import probe as run_probe
from autotune.probing.tracing import ServerTracer
from autotune.study.problem import ProbeRun, SearchOutcome, StudyStorage
from autotune.study.searching import search
from autotune.study.storage import check_storage
from autotune.trainers.problem import TrainerProblem
from autotune.units import format_bytes

_HANGING_FACTOR = 3.0
"""A run counts as hanging after this multiple of the time expected from its candidate's probe."""

_OWN_STUDY = "autotune"
"""Name of the study in an output directory."""

_TIMED_UNTIL = 0.75
"""Share of a run's time limit after which timing ends; the rest is for evaluation and a save."""


@dataclass(frozen=True)
class Run:
    """Everything that a search needs.

    Attributes:
        limit_bytes: memory that a probe may use; allocations beyond it fail.
        timeout_seconds: time limit of the search, or None.
        predictor: predictions before any probe, or None.
    """

    arguments: ProbeArguments
    problem: TrainerProblem
    server: JobServer
    output: Output
    limit_bytes: int
    timeout_seconds: float | None = None
    predictor: Predictor | None = None


@contextmanager
def worker_servers(
    hardware: Hardware, share: Share, listener: Listener, *, early: bool = False
) -> Iterator[tuple[JobServer, ServerTracer]]:
    """Yield a worker's server for probes, and its tracer, which shares that server on a CPU and else has its own.

    Args:
        hardware: the device of each worker.
        share: this worker's share of the machine.
        early: whether the tracer's own server is started at once.
    """
    with (
        JobServer(hardware.kind, threads=hardware.threads, processes=hardware.processes, share=share) as server,
        ServerTracer(hardware.cores, listener, server if hardware.kind == "cpu" else None) as tracer,
    ):
        if early:
            _ = tracer.server
        yield server, tracer


def run_search(run: Run, listener: Listener) -> SearchOutcome:
    """Search, and return the outcome; Ctrl-C ends the search early and is recorded in the outcome.

    Raises:
        StudyMismatchError: the study to resume belongs to something else.
        InputError: the storage cannot be used.
        AutotuneError: probes cannot be started, or the storage failed.
    """
    listener(StageStarted("Searching"))
    args, effort, problem = run.arguments, EFFORTS[run.arguments.effort], run.problem

    def probe_candidate(probe_run: ProbeRun, seconds_left: float | None) -> Measurement:
        seed, limit_seconds = seed_of(probe_run, args.seed), timeout_of(probe_run, effort, seconds_left)
        schedule = replace(probe_run.schedule, latest_seconds=_TIMED_UNTIL * limit_seconds)
        request = probe_request(problem, probe_run.candidate, schedule, run.limit_bytes, seed)
        return run_probe(run.server, request, run.output.probe(probe_run), limit_seconds)

    return search(
        problem,
        probe_candidate,
        effort=effort,
        memory_limit_bytes=run.limit_bytes,
        seed=args.seed,
        trials=args.trials,
        timeout_seconds=run.timeout_seconds,
        storage=storage_of(run),
        listener=listener,
        predictor=run.predictor,
    )


def storage_of(run: Run) -> StudyStorage:
    """Return the study of a search, and its location."""
    # The compared choices always include last resorts: whether a run adds them depends on how much it could trace,
    # which varies between workers and runs.
    args, compared = run.arguments, with_last_resorts(run.problem)
    url, name = study_of(args, run.output)
    return StudyStorage(
        url=url, name=name, resume=args.resume, fingerprint=fingerprint(compared, run.limit_bytes, args.seed)
    )


def check_study(args: ProbeArguments, output: Output, fingerprint: Mapping[str, str] | None = None) -> None:
    """Check before the search that its study can be stored, and belongs to the same search.

    Args:
        fingerprint: the search's fingerprint; None: not yet known.

    Raises:
        InputError: the storage cannot be used, or the study exists and is not to be resumed.
        StudyMismatchError: the study to be resumed was made for another search.
    """
    if args.storage is not None or output.study_file.exists():
        check_storage(*study_of(args, output), resume=args.resume, fingerprint=fingerprint)


def study_of(args: ProbeArguments, output: Output) -> tuple[str, str]:
    """Return the URL and the name of a search's study.

    The database in an output directory has one study with a fixed name, so that the directory may be renamed or copied.
    """
    if args.storage is None:
        return output.study_url, _OWN_STUDY
    return args.storage, args.study or output.directory.name


def timeout_of(run: ProbeRun, effort: Effort, seconds_left: float | None) -> float:
    """Return the seconds after which a run is killed: the effort's, or more if its candidate's probe was slow."""
    longest = max(effort.probe_timeout_seconds, _HANGING_FACTOR * run.expected_seconds)
    return longest if seconds_left is None else min(longest, seconds_left)


def seed_of(run: ProbeRun, seed: int) -> int:
    """Return the seed of a run's batches: one for all probes, and one for each pair of short runs.

    A short run trains on a small sample of the rows. With one seed for all pairs, the spread of their rates would not
    include the variation between samples.
    """
    return seed if run.turn is None else seed + 1 + run.turn.pair


def fingerprint(problem: TrainerProblem, limit_bytes: int, seed: int) -> dict[str, str]:
    """Return everything that measurements of a study depend on, by name; studies are comparable if all values match.

    Differing values are shown to the user, so short values are kept as they are, and long ones as a hash.
    """
    setting = problem.setting
    workload, hardware = setting.workload, setting.machine.hardware
    parts: dict[str, object] = {
        "model": [workload.models_fingerprint, workload.model_source.init],
        "dataset": workload.dataset.fingerprint,
        **({"evaluation dataset": workload.evaluation.fingerprint} if workload.evaluation is not None else {}),
        "completions and rewards": encode(workload.rollouts),
        **({"base": encode(replace(setting.base, file="", unsearched={}))} if setting.base is not None else {}),
    }
    texts = {name: json.dumps(part, sort_keys=True).encode() for name, part in parts.items()}
    return {
        **{name: hashlib.sha256(text).hexdigest()[:16] for name, text in texts.items()},
        "trainer": workload.trainer,
        "device": f"{hardware.name} ({hardware.kind})",
        "processes": str(hardware.processes),
        "CPU cores": str(hardware.cores),
        **({"environment variables": hardware.variables} if hardware.variables else {}),
        "memory limit": f"{format_bytes(limit_bytes)} ({limit_bytes:,} bytes, the budget less its margin)",
        "seed": str(seed),
        "global batch size": str(setting.global_batch_size),
        "token coverage": str(setting.token_coverage),
        "allowed techniques": ", ".join(sorted(setting.allowed)) or "none",
        # The candidates' plans, and so the measurements, depend on it.
        "source of autotune": package_digest(),
        **{f"version of {name}": version for name, version in environment(setting.machine).items()},
        **{f"choices of {knob}": ", ".join(map(str, choices)) for knob, choices in problem.choices.items()},
    }
