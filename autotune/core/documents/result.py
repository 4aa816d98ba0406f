"""The document of ``autotune probe``, ``result.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autotune.core.candidate import Candidate, Choice
from autotune.core.documents.length_report import LengthBin, LengthLimit
from autotune.core.documents.memory_timeline import MemoryTimeline
from autotune.core.documents.short_repr import ShortRepr
from autotune.core.documents.unsearched import ExcludedChoice, Unlockable
from autotune.core.machine import Hardware
from autotune.core.measurement import MemoryUse
from autotune.core.plan import TrainingPlan
from autotune.core.rows.epoch import Epoch
from autotune.core.status import OUT_OF_MEMORY, Ending, ProbeStatus, RunStatus
from autotune.core.workload import Workload

_ENV, _HUB = "env.", "HF_TOKEN"
_TOKENS = ("hub_token", "model_init_kwargs.token")


@dataclass(frozen=True)
class LaterFailure:
    """The first later run of a candidate, after its probe, that did not end ``ok``.

    Attributes:
        longer: whether it is the longer run; else it is a short one.
        reason: why it failed.
    """

    longer: bool
    status: ProbeStatus
    reason: str


@dataclass(frozen=True)
class Smallest:
    """The candidate of the space with the smallest predicted need.

    Attributes:
        predicted_bytes: the prediction, as raised by probes that ran out of memory.
        number: number of its trial, or of that of another candidate with the same plan; None if it was not tried.
    """

    candidate: Candidate
    predicted_bytes: int
    number: int | None


@dataclass(frozen=True)
class Trial(MemoryUse):
    """One candidate of the search.

    Attributes:
        number: the Optuna trial's number, and the name of its folder under ``probes/``.
        reason: why its status is not ``ok``; else empty.
        start_seconds: time from the request to the first training step; None without a step.
        wall_seconds: duration of the probe; 0 for a vetoed candidate.
        predicted_bytes: need as predicted before its probe; None without a prediction.
        predicted_tokens_per_second: token rate as predicted before its probe.
        illegal: why it may not be recommended even if it fits; else empty.
        later_failure: the first later run that did not end ``ok``, or None.
    """

    number: int
    candidate: Candidate
    status: ProbeStatus
    reason: str
    tokens_per_second: float | None
    start_seconds: float | None
    wall_seconds: float
    predicted_bytes: int | None = None
    predicted_tokens_per_second: float | None = None
    illegal: str = ""
    later_failure: LaterFailure | None = None

    @property
    def lacked_memory(self) -> bool:
        """Whether its probe or a later run ran out of memory, on the device or on the host."""
        later = self.later_failure
        return self.status in OUT_OF_MEMORY or (later is not None and later.status in OUT_OF_MEMORY)


@dataclass(frozen=True, repr=False)
class MeasuredCandidate(ShortRepr, MemoryUse, Epoch):
    """The recommendation or the baseline, with its figures; steps and epoch are measured.

    Attributes:
        number: number of its trial.
        plan: the training plan of the bundle.
        tokens_per_second: dataset tokens, padding excluded, over the time of an optimizer step; the geometric mean of
            ``runs`` runs.
        tokens_per_second_low, tokens_per_second_high: 95 % prediction interval of one run at a later time, from
            the spread between runs; None for fewer than two runs.
        runs: number of averaged runs: the longer run and the short ones, or else the probe.
        peaks: peak bytes on the device in each phase of the step program, by phase name.
        seconds: time of the phases of a mean optimizer step, in seconds, of one run: the longer one, or else the probe.
        evaluation_seconds: time of an evaluation on all its rows, which the token rate excludes; None without one.
        timeline: its traced memory through one step; None if nothing was traced.
    """

    number: int
    candidate: Candidate
    plan: TrainingPlan
    status: ProbeStatus
    reason: str
    tokens_per_second: float | None
    tokens_per_second_low: float | None = None
    tokens_per_second_high: float | None = None
    runs: int = 1
    peaks: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    evaluation_seconds: float | None = None
    timeline: MemoryTimeline | None = None


@dataclass(frozen=True)
class Contribution:
    """The contribution of one of the winner's choices, measured by changing that choice back to the baseline's.

    Attributes:
        knob: the technique.
        choice: the winner's choice.
        instead_of: the baseline's choice.
        status: status of the candidate with that choice changed back.
        reason: why it was not measured; else empty.
        speedup: the winner's token rate divided by that candidate's, each the mean of its later runs, or else of its
            probe; None if not measured.
        peak_bytes_saved: memory of that candidate minus the winner's in the nearer of its probe and its longer run; 0
            if it lies between the two; None if not measured.
        significant: whether that candidate's rate is outside the prediction interval of a further run of the winner;
            None if either was not measured.
    """

    knob: str
    choice: Choice
    instead_of: Choice
    number: int | None
    status: ProbeStatus
    reason: str
    speedup: float | None
    peak_bytes_saved: int | None
    significant: bool | None = None


@dataclass(frozen=True)
class BaseFile:
    """The user's own configuration that a run started from, and the file edited by the recommendation.

    Without a recommendation, all attributes but ``file`` are empty.

    Attributes:
        file: as the user named it.
        keys: by technique, the file's keys and values that the recommendation changes.
        text: the body of the recommendation's ``config.yaml``.
        diff: the difference between the file and that text.
        args: the keys of that text that are fields of the trainer's configuration, with their values.
        further: those that are fields of TRL's other classes: of the model, the data, the rewards.
        env: environment variables that it sets.
        launch: the document for ``accelerate launch`` that the file names; empty without one.
        withheld: secret keys of the file, such as ``env.HF_TOKEN``, which are never written.
    """

    file: str
    keys: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    text: str = ""
    diff: str = ""
    args: Mapping[str, object] = field(default_factory=dict)
    further: Mapping[str, object] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    launch: Mapping[str, object] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()

    @property
    def withheld_text(self) -> str:
        """How to pass the withheld secrets to a training, in a sentence; empty if nothing is withheld.

        By default, calls of the hub use the token in the environment (``huggingface_hub.get_token``).
        """
        if not self.withheld:
            return ""
        variables = [path.removeprefix(_ENV) for path in self.withheld if path.startswith(_ENV)]
        variables += [_HUB] if _HUB not in variables and any(path.endswith(_TOKENS) for path in self.withheld) else []
        others = [path for path in self.withheld if not path.startswith(_ENV) and not path.endswith(_TOKENS)]
        ways = [f"set {', '.join(variables)} in the environment"] if variables else []
        ways += [f"write {', '.join(others)} there yourself"] if others else []
        listed = f"{', '.join(self.withheld)} of {self.file} {'is' if len(self.withheld) == 1 else 'are'} secret"
        return f"{listed}, and so not handed over: {' and '.join(ways)}."


@dataclass(frozen=True)
class Timelines:
    """The memory of recommendation and baseline through a step; encoded by ``core.codec``: ``timeline.json``."""

    recommended: MemoryTimeline | None
    baseline: MemoryTimeline | None


@dataclass(frozen=True, repr=False)
class Result(ShortRepr):
    """The result of a run. Encoded by ``core.codec``, this is ``result.json``.

    Attributes:
        environment: versions of the measured software, by package, and of the driver.
        budget_bytes: memory that a candidate may need, before the margin is subtracted.
        margin: share of the budget that was kept free while probing.
        recommended: the winner, or the best so far of an interrupted search; None if there is neither.
        baseline: TRL's default at the same global batch, or the user's own configuration; None if it was never
            measured.
        speedup: the recommendation's token rate divided by the baseline's: the geometric mean over ``pairs`` pairs of
            short runs, or else the ratio of their probes; None if the baseline did not run.
        confirmed: whether the recommendation passed the longer run and all short ones.
        smallest_peak_bytes: the smallest need of any probe, for a budget in which nothing fits; after an out-of-memory
            error, including the failed request. Candidates that fit but are illegal are excluded.
        settings: the options of the run that differ from the defaults, by the names of the API's parameters.
        output_directory: directory of the bundle.
        speedup_low, speedup_high: 95 % confidence interval of the mean; None for fewer than two pairs.
        pairs: number of pairs of alternating short runs of the recommendation and the baseline.
        base: the user's configuration that the run started from, which is then the baseline; None without one.
        candidates: number of candidates in the search space.
        ended: the reason why the search ended; None if the user interrupted it.
        compared: the number of compared candidates, and the end of the search, as the words after "it is"; empty
            without a recommendation, and if no candidate was left.
        smallest: the candidate with the smallest predicted need, if nothing is recommended, needs are predicted, and
            there was time to trace it.
        lengths: histogram of the row lengths, as in ``autotune lengths``; empty in documents of earlier versions.
        limit: the tokens and rows that the recommendation's ``max_length`` keeps; None if no maximum length applies, or
            without a recommendation.
        shorter: if nothing is recommended, shorter maximum lengths with the tokens and rows that they would keep.
    """

    schema: int = field(default=1, kw_only=True)
    status: RunStatus
    trainer: str
    workload: Workload
    hardware: Hardware
    environment: Mapping[str, str]
    budget_bytes: int
    margin: float
    global_batch_size: int
    token_coverage: float
    recommended: MeasuredCandidate | None
    baseline: MeasuredCandidate | None
    speedup: float | None
    contributions: tuple[Contribution, ...]
    confirmed: bool
    trials: tuple[Trial, ...]
    unlockable: tuple[Unlockable, ...] = ()
    left_out: tuple[ExcludedChoice, ...] = ()
    notes: tuple[str, ...] = ()
    smallest_peak_bytes: int | None = None
    wall_seconds: float = 0.0
    settings: Mapping[str, object] = field(default_factory=dict)
    output_directory: str = ""
    speedup_low: float | None = None
    speedup_high: float | None = None
    pairs: int = 0
    base: BaseFile | None = None
    candidates: int = 0
    ended: Ending | None = None
    compared: str = ""
    smallest: Smallest | None = None
    lengths: tuple[LengthBin, ...] = ()
    limit: LengthLimit | None = None
    shorter: tuple[LengthLimit, ...] = ()

    @property
    def written(self) -> Result:
        """The result for ``result.json``, without the moments of timelines, which ``timeline.json`` has."""
        outlines = [timeline and timeline.outline for timeline in (self.timelines.recommended, self.timelines.baseline)]
        return replace(self._with(*outlines), workload=self.workload.summary)

    @property
    def timelines(self) -> Timelines:
        """The memory of recommendation and baseline through a step."""
        return Timelines(*(one.timeline if one is not None else None for one in (self.recommended, self.baseline)))

    def with_moments(self, timelines: Timelines) -> Result:
        """Return the result with the moments of timelines; timelines of another result are ignored."""
        own = self.timelines
        return self._with(
            *(
                full if outline is not None and full is not None and full.outline == outline else outline
                for outline, full in ((own.recommended, timelines.recommended), (own.baseline, timelines.baseline))
            )
        )

    def _with(self, recommended: MemoryTimeline | None, baseline: MemoryTimeline | None) -> Result:
        return replace(
            self,
            recommended=self.recommended and replace(self.recommended, timeline=recommended),
            baseline=self.baseline and replace(self.baseline, timeline=baseline),
        )
