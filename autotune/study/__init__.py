"""The Optuna study that chooses candidates, records them, and selects, attributes and confirms a winner."""

from autotune.study.problem import Probe, ProbeRun, Problem, Purpose, Record, SearchOutcome, StudyStorage
from autotune.study.searching import search
from autotune.study.storage import begin, check_storage

__all__ = [
    "Probe",
    "ProbeRun",
    "Problem",
    "Purpose",
    "Record",
    "SearchOutcome",
    "StudyStorage",
    "begin",
    "check_storage",
    "search",
]
