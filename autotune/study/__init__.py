"""Searches: an Optuna study of probes that finds, attributes and confirms a winner, and a search by traces."""

from autotune.study.improvement import MOST_TRACED, search_by_traces
from autotune.study.problem import Probe, ProbeRun, Problem, Purpose, Record, SearchOutcome, StudyStorage
from autotune.study.searching import search
from autotune.study.storage import begin, check_storage

__all__ = [
    "MOST_TRACED",
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
    "search_by_traces",
]
