"""Several workers of one machine search one study, and none is left running."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import optuna
import psutil
import pytest
from optuna.trial import FrozenTrial, TrialState

from autotune.app import search
from autotune.app.arguments import ProbeArguments
from autotune.app.output import Output
from autotune.app.predictions import times_of, trace_before_search
from autotune.app.search import Run, fingerprint
from autotune.app.workers.parallel import search_in_parallel
from autotune.app.workers.worker import deserialize, serialize
from autotune.core.candidate import Candidate
from autotune.core.events import REPEATED, Event, Noted, ProbeFinished, ignore
from autotune.core.gpu import GpuSpeeds
from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.machine import Share
from autotune.core.measurement import Measurement
from autotune.errors import AutotuneError, InputError
from autotune.planning.tracing.cache import Cache
from autotune.probing import JobServer
from autotune.probing.tracing import ServerTracer
from autotune.study.problem import SearchOutcome
from autotune.trainers import find_trainer
from autotune.units import GIB
from tests.app.replaying import BEGUN, HANG, LOG, MODULE, no_server, replay
from tests.planning.stand_in import AnalyticTracer
from tests.probing.processes import wait_until
from tests.settings import CPU, GPU, problem, setting, workload

TRIALS = 4


def a_run(folder: Path, storage: str | None = None) -> Run:
    """Return a search whose probes are replayed."""
    asked = ProbeArguments(trainer="sft", device="cpu", trials=TRIALS, effort="quick", storage=storage)
    return Run(asked, problem(setting()), no_server(), Output(folder), 1 << 30)


def probed(folder: Path) -> list[list[str]]:
    """Return who probed what, by process, folder and plan."""
    return [line.split() for line in (folder / LOG).read_text().splitlines()]


class Two:
    """A search by this process and a further worker; here nothing is probed before that one has begun a probe or ended.

    Attributes:
        events: what the listener heard.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, module: str = MODULE) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.when_both_probe: Callable[[], None] = lambda: None
        self._module = module
        # Servers of other tests are processes of this one, too.
        self._before = psutil.Process().children()
        monkeypatch.setattr(search, "run_probe", self._probe)

    def __call__(self) -> SearchOutcome:
        """Search."""
        return search_in_parallel(a_run(self.folder), [Share()], self.events.append, self._module)

    @property
    def workers(self) -> list[psutil.Process]:
        """The processes of the further workers."""
        return [child for child in psutil.Process().children() if child not in self._before]

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials of the study."""
        study = optuna.load_study(study_name=None, storage=f"sqlite:///{self.folder / 'study.db'}")
        return study.get_trials()

    def _probe(self, server: JobServer, request: ProbeRequest, folder: Path, timeout: float | None) -> Measurement:
        if self._module == MODULE:
            assert wait_until((self.folder / BEGUN).exists)
            self.when_both_probe()
        return replay(server, request, folder, timeout)


def test_two_workers_probe_each_candidate_once_and_end_with_one_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tmp_path, monkeypatch)
    outcome = two()
    assert outcome.confirmed
    lines = [line for line in probed(tmp_path) if line[1].isdigit()]
    assert len({process for process, *_ in lines}) == 2
    assert set(Counter(plan for *_, plan in lines).values()) == {1}
    assert {record.number for record in outcome.records if record.probed} == {int(number) for _, number, _ in lines}
    told = [event for event in two.events if isinstance(event, ProbeFinished) and event.purpose not in REPEATED]
    assert sorted(event.number for event in told) == sorted(int(number) for _, number, _ in lines)
    assert two.workers == []


@pytest.mark.nightly
def test_a_worker_that_is_killed_is_noticed_and_its_candidate_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tmp_path, monkeypatch)
    (tmp_path / HANG).touch()

    def kill_the_other() -> None:
        for worker in two.workers:
            worker.kill()
        (tmp_path / HANG).unlink(missing_ok=True)

    two.when_both_probe = kill_the_other
    outcome = two()
    assert outcome.confirmed
    assert sum(record.probed for record in outcome.records) == TRIALS
    (noted,) = (event.text for event in two.events if isinstance(event, Noted))
    assert noted.startswith("Worker 2 (process ")
    assert noted.endswith(" ended: signal 9. The others went on.")
    (lost,) = (trial for trial in two.trials if "autotune:lost" in trial.system_attrs)
    assert Candidate(lost.user_attrs["candidate"]) in [record.candidate for record in outcome.records if record.probed]


def test_ctrl_c_ends_all_workers_and_keeps_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(tmp_path, monkeypatch)
    (tmp_path / HANG).touch()

    def interrupt() -> None:
        raise KeyboardInterrupt

    two.when_both_probe = interrupt
    assert two().interrupted
    assert two.workers == []
    assert not [event for event in two.events if isinstance(event, Noted)]
    assert {trial.state for trial in two.trials} == {TrialState.FAIL}
    assert not [trial for trial in two.trials if "autotune:lost" in trial.system_attrs]


def test_a_worker_that_cannot_start_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tmp_path, monkeypatch, "tests.app.no_such_module")
    assert two().confirmed
    noted = next(event.text for event in two.events if isinstance(event, Noted))
    assert "exit status 1" in noted
    assert "No module named" in noted


def test_workers_cannot_share_a_study_in_the_memory_of_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="memory of one process"):
        search_in_parallel(a_run(tmp_path, "sqlite://"), [Share()], lambda _: None)


def test_a_search_is_sent_with_all_that_was_traced_and_without_the_processes_of_the_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    analytic = AnalyticTracer()
    monkeypatch.setattr(ServerTracer, "__call__", lambda _, requests: analytic(requests))
    searched = ("max_length", "packing", "gradient_checkpointing", "per_device_train_batch_size")
    excluded = frozenset(item.name for item in find_trainer("sft").techniques if item.name not in searched)
    of_search = replace(setting(machine=GPU, of=workload(lengths={1024: 8})), excluded=excluded)
    here = problem(of_search, {"max_length": 1024})
    with ServerTracer(1, ignore) as own, ServerTracer(1, ignore) as other:
        cache, server = Cache(tmp_path / "cache"), no_server()
        times = times_of(CPU, None, GIB, server, own, cache)
        predictions = trace_before_search(here, 10 * GIB, own, cache, _no_speeds, 600.0, ignore, times=times)
        assert predictions.evaluator is not None
        sent = replace(a_run(tmp_path), problem=here, predictor=predictions.predictor)
        received = deserialize(serialize(sent), server, other)
        assert received.server is server
        known, count = predictions.evaluator.candidates, len(analytic.requests)
        assert sent.predictor is not None
        assert received.predictor is not None
        predicted = [sent.predictor.predict(candidate) for candidate in known]
        assert [received.predictor.predict(candidate) for candidate in known] == predicted
        assert any(predicted)
        assert len(analytic.requests) == count
        assert fingerprint(received.problem, GIB, 1) == fingerprint(here, GIB, 1)
        assert [received.problem.identity(one) for one in known] == [here.identity(one) for one in known]


def _no_speeds(_: GpuSpeeds | None) -> GpuSpeeds:
    raise AutotuneError("There is no host to measure.")
