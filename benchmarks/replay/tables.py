"""A recorded table: a problem, and the measurements of each of its candidates."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.app.arguments import ProbeArguments
from autotune.app.options import Options, probe_options
from autotune.app.problem import problem_of
from autotune.core.candidate import Candidate, Choice
from autotune.core.documents.estimate import Estimate, Origin, rank_key
from autotune.core.files.codec import decode, encode
from autotune.core.machine import Machine
from autotune.core.measurement import Measurement
from autotune.core.workload import Workload
from autotune.inspection.space_file import load
from autotune.study.problem import Problem
from autotune.trainers import find_trainer
from autotune.trainers.problem import TrainerProblem

RECORDED = Path(__file__).resolve().parent / "recorded"
SMALL_SPACE = "small_space.yaml"


@dataclass(frozen=True)
class Row:
    """One candidate.

    Attributes:
        measurements: what its probes showed, one from each round.
        traced: what was estimated of it by traces.
    """

    candidate: Candidate
    measurements: tuple[Measurement, ...]
    traced: Estimate | None = None

    @property
    def measurement(self) -> Measurement:
        """The one of median rate; one that ran out of memory counts as the slowest."""
        ordered = sorted(self.measurements, key=lambda shown: shown.tokens_per_second or 0.0)
        return ordered[(len(ordered) - 1) // 2]


@dataclass(frozen=True)
class RecordedProblem(TrainerProblem):
    """A problem of which some candidates were recorded; a search also comes to neighbours of the space's candidates.

    Attributes:
        recorded: the legal candidates.
    """

    recorded: frozenset[Candidate]

    def illegal(self, candidate: Candidate) -> str | None:
        """Return why a candidate may not be tried."""
        return super().illegal(candidate) if candidate in self.recorded else "it was not recorded"

    def knobs_of_violated_rule(self, candidate: Candidate) -> Collection[str]:
        """Return all knobs: which of them to change for a recorded candidate is not known."""
        return candidate


@dataclass(frozen=True)
class Table:
    """What was recorded, on one machine, in one go.

    Techniques that were added later are absent from recorded candidates: :func:`read_table` completes these with the
    one choice that the recorded part of the space has for them, which is TRL's default, with which they ran.

    Attributes:
        workload: without the places where it lay.
        limit_bytes: what a probe could use.
        threads: of a probe.
        seconds: that the recording took.
        space: the file in :data:`RECORDED` with the part of the space that was recorded.
    """

    workload: Workload
    machine: Machine
    environment: Mapping[str, str]
    global_batch_size: int
    limit_bytes: int
    threads: int
    seconds: float = 0.0
    rows: tuple[Row, ...] = field(default=())
    space: str = SMALL_SPACE

    def problem(self) -> TrainerProblem:
        """Return the problem whose candidates were recorded."""
        wanted = options(self.space, self.workload.trainer)
        return problem_of(wanted, self.workload, self.machine, self.global_batch_size)

    def replayed(self) -> RecordedProblem:
        """Return the problem without candidates that were not recorded."""
        problem = self.problem()
        recorded = frozenset(row.candidate for row in self.rows)
        return RecordedProblem(problem.trainer, problem.space, problem.setting, recorded)


@dataclass(frozen=True)
class Reordered:
    """A problem whose knobs come in another order."""

    problem: Problem
    seed: int

    def __getattr__(self, name: str) -> object:
        return getattr(self.problem, name)

    @property
    def choices(self) -> Mapping[str, tuple[Choice, ...]]:
        """The choices of every knob, in another order."""
        knobs = list(self.problem.choices)
        random.Random(self.seed).shuffle(knobs)
        return {knob: self.problem.choices[knob] for knob in knobs}


class RecordedRunner:
    """Runs candidates by the recorded traces of a table; implements :class:`autotune.core.documents.estimate.Runner`.

    Args:
        budget_bytes: memory that training may need; None: that of the recording.

    Attributes:
        asked: what was run.
    """

    def __init__(self, table: Table, budget_bytes: int | None = None) -> None:
        self._rows = {row.candidate: row for row in table.rows}
        self._budget_bytes = table.limit_bytes if budget_bytes is None else budget_bytes
        self.asked: list[Candidate] = []

    def run(self, candidates: Sequence[Candidate]) -> list[Estimate]:
        """Return the recorded estimates of candidates."""
        self.asked += candidates
        return [self.estimate(candidate) for candidate in candidates]

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the recorded estimate of a candidate."""
        row = self._rows.get(candidate)
        found = row.traced if row is not None else None
        if found is None or found.memory is None:
            return Estimate(candidate, Origin.UNKNOWN, reason="it was not recorded")
        estimate = replace(
            found,
            spare_bytes=self._budget_bytes - found.memory.device_bytes,
            scaled_tokens_per_second=found.scaled_tokens_per_second or found.tokens_per_second,
        )
        return estimate if estimate.may_fit else replace(estimate, tokens_per_second=None)

    def everything(self) -> list[Estimate]:
        """Return the recorded estimates of all candidates, the best first."""
        return sorted(map(self.estimate, self._rows), key=rank_key)


def legal_candidates(problem: TrainerProblem) -> tuple[Candidate, ...]:
    """Return every legal candidate of a small problem once, in its normal form, by looking at all combinations."""
    combinations = itertools.product(*problem.choices.values())
    spelled = (Candidate(dict(zip(problem.choices, chosen, strict=True))) for chosen in combinations)
    normal = dict.fromkeys(map(problem.normal, spelled))
    return tuple(candidate for candidate in normal if problem.illegal(candidate) is None)


def recordable(problem: TrainerProblem) -> tuple[Candidate, ...]:
    """Return the candidates that a search can probe: the legal ones, and TRL's default, which may train on less."""
    return tuple(dict.fromkeys((problem.baseline, *legal_candidates(problem))))


def options(space: str = SMALL_SPACE, trainer: str = "sft") -> Options:
    """Return the options of a recording, beside the budget: the defaults, on a part of the space, all of it allowed.

    A precision that is the only one is fixed, so that TRL's default has it too.
    """
    file = RECORDED / space
    named = load(file, trainer, find_trainer(trainer).techniques).choices
    precisions = named.get("precision", ())
    fix = {"precision": precisions[0]} if len(precisions) == 1 else None
    wanted = ProbeArguments(trainer=trainer, device="cpu", margin=0.05, allow=named, fix=fix, space=file)
    return probe_options(wanted)


def placeless(workload: Workload) -> Workload:
    """Return the workload without paths of the machine that it was read on."""
    name = Path(workload.model.name).name
    source, data = workload.model_source, workload.dataset_source
    file = Path(data.name).name
    return replace(
        workload,
        model_source=replace(source, name=name),
        dataset_source=replace(data, name=file, data_files=file),
        model=replace(workload.model, name=name),
        dataset=replace(workload.dataset, name=file, tokenized_directory=""),
    )


def write_table(table: Table, file: Path) -> None:
    """Write a table as JSON, one candidate to a line; compressed where the name ends in .gz."""
    document = encode(table)
    rows = ",\n".join(json.dumps(row) for row in document.pop("rows"))
    head = json.dumps(document, indent=1)
    written = f'{head[:-2]},\n "rows": [\n{rows}\n]}}\n'.encode()
    file.write_bytes(gzip.compress(written, mtime=0) if file.suffix == ".gz" else written)


def read_table(file: Path) -> Table:
    """Return the table in a file, its candidates with the techniques of today.

    Raises:
        ValueError: the recorded part of the space has several choices of a technique that was added later.
    """
    read = file.read_bytes()
    table = decode(Table, json.loads(gzip.decompress(read) if file.suffix == ".gz" else read))
    choices = table.problem().choices
    return replace(table, rows=tuple(_completed(row, choices) for row in table.rows))


def _completed(row: Row, choices: Mapping[str, tuple[Choice, ...]]) -> Row:
    added = {knob: found for knob, found in choices.items() if knob not in row.candidate}
    if several := [knob for knob, found in added.items() if len(found) > 1]:
        raise ValueError(f"record the table again: it has one choice of {', '.join(several)}, its space several")
    candidate = row.candidate.but(**{knob: choice for knob, (choice,) in added.items()})

    def same(estimate: Estimate | None) -> Estimate | None:
        return replace(estimate, candidate=candidate) if estimate else None

    return replace(row, candidate=candidate, traced=same(row.traced))
