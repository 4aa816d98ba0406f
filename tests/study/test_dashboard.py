"""A study is a plain Optuna study: optuna-dashboard shows it, with meaningful names."""

from __future__ import annotations

import optuna

from autotune.core.candidate import Candidate
from autotune.core.measurement import Measurement, Schedule
from autotune.core.status import ProbeStatus
from autotune.units import GIB
from tests.study.dashboard import attributes, shown
from tests.study.foretold import Foretold
from tests.study.replayed import BASELINE, ReplayedTable, peak_bytes
from tests.study.running import PATIENT, Run


def test_the_dashboard_shows_knobs_rates_outcomes_and_memory(durable: Run) -> None:
    outcome = durable(ReplayedTable(), predictor=Foretold())
    study = shown(durable.url)
    assert study["name"] == "s"
    assert study["objective_names"] == ["tokens per second"]
    assert len(study["trials"]) == len(outcome.records)
    knobs = {knob for knob, choices in durable.problem.choices.items() if len(choices) > 1}
    assert {item["name"] for item in study["union_search_space"]} == knobs
    for record, trial in zip(outcome.records, study["trials"], strict=True):
        found = attributes(trial)
        assert record.prediction is not None
        assert float(found["predicted memory (GiB)"]) == round(record.prediction.need_bytes / GIB, 4)
        assert found["outcome"] == record.measurement.status.value.replace("_", " ")
        assert found.get("reason", "") == record.measurement.reason
        if record.measurement.ok:
            assert trial["values"] == [record.measurement.tokens_per_second]
            assert float(found["memory used (GiB)"]) == round(peak_bytes(record.candidate) / GIB, 4)
            named = {item["name"]: item["param_external_value"] for item in trial["params"]}
            assert named == {knob: str(record.candidate[knob]) for knob in named}


def test_optunas_best_trial_may_be_recommended_and_what_is_recommended_is_named(durable: Run) -> None:
    durable.problem.forbidden = {"checkpointing": "on"}
    fast = Measurement(ProbeStatus.OK, peak_bytes=1, tokens_per_second=1e9)
    best = durable(ReplayedTable(shown={BASELINE: fast})).winner
    study = optuna.load_study(study_name="s", storage=durable.url)
    assert best is not None
    assert study.user_attrs["recommended trial"] == best.number
    assert study.best_trial.number != 0


def test_a_trial_that_failed_its_longer_run_is_not_the_recommended_one(durable: Run) -> None:
    failing = BASELINE.but(attention="flash", packing="bfd", liger="on")
    durable.problem.recipes = (failing,)
    failed = Measurement(ProbeStatus.OUT_OF_MEMORY, "in backward")
    replies: dict[Candidate | tuple[Candidate, Schedule], Measurement] = {(failing, PATIENT.confirmation): failed}
    best = durable(ReplayedTable(shown=replies)).winner
    assert best is not None
    assert best.candidate != failing
    study = optuna.load_study(study_name="s", storage=durable.url)
    assert study.user_attrs["recommended trial"] == best.number
