"""A study is a plain Optuna study: optuna-dashboard shows it, with names that make sense there."""

from __future__ import annotations

from autotune.units import GIB
from tests.study.dashboard import attributes, shown
from tests.study.foretold import Foretold
from tests.study.replayed import ReplayedTable, peak_bytes
from tests.study.running import Run


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
            assert float(found["peak memory (GiB)"]) == round(peak_bytes(record.candidate) / GIB, 4)
            named = {item["name"]: item["param_external_value"] for item in trial["params"]}
            assert named == {knob: str(record.candidate[knob]) for knob in named}
