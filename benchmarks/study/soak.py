"""Many workers search one study of 200 trials, while some are killed (signal 9) and replaced.

Run ``python -m benchmarks.study.soak``; it prints a Markdown table. Probes are replayed from a table of formulas
and sleep; nothing is trained. ``--storage postgresql`` starts a server of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from tests.study.postgres import Postgres, lacking
from tests.study.workers import Workers, assert_shared

_PROBE_SECONDS = 0.4
_LEASE_SECONDS = 15.0


def main() -> None:
    """Search, kill, replace, check, and print the table."""
    parser = argparse.ArgumentParser(description="A long search by many workers.")
    parser.add_argument("--storage", choices=("journal", "sqlite", "postgresql"), default="journal")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--restarts", type=int, default=2, help="of the server, with --storage postgresql")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.storage == "postgresql" and (why := lacking()):
        parser.error(why)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = Postgres() if asked.storage == "postgresql" else None
        url = server.url if server else _url(asked.storage, folder)
        workers = Workers(url, folder, asked.trials, _PROBE_SECONDS, _LEASE_SECONDS)
        try:
            _soak(workers, asked, server)
        finally:
            workers.end()
            if server:
                server.remove()


def _url(storage: str, folder: Path) -> str:
    return f"journal://{folder / 'study.log'}" if storage == "journal" else f"sqlite:///{folder / 'study.db'}"


def _soak(workers: Workers, asked: argparse.Namespace, server: Postgres | None) -> None:
    chance = random.Random(asked.seed)
    started = time.monotonic()
    restarts = asked.restarts if server else 0
    moments = sorted(chance.sample(range(5, asked.trials - 20), asked.kills + restarts))
    events = ["kill"] * asked.kills + ["restart"] * restarts
    chance.shuffle(events)
    workers.start(asked.workers)
    for moment, event in zip(moments, events, strict=True):
        workers.until_ended(moment)
        if server is not None and event == "restart":
            server.stop()
            server.start()
        else:
            workers.kill(chance)
            workers.start(1)
    outcomes = workers.outcomes()
    seconds = time.monotonic() - started
    study = optuna.load_study(storage=_opened(workers.url), study_name="s")
    repeated = assert_shared(workers, outcomes, study)
    states = [trial.state for trial in study.get_trials(deepcopy=False)]
    withdrawn = states.count(TrialState.FAIL) - len(repeated)
    print(f"{os.cpu_count()} cores; probes of {_PROBE_SECONDS} s, each by sleeping.\n")
    print("| storage | workers | trials | vetoed | killed and repeated | restarts | claims withdrawn | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    vetoed = len(outcomes[0].records) - asked.trials
    figures = (asked.storage, asked.workers, asked.trials, vetoed, len(repeated), restarts, withdrawn, round(seconds))
    print(f"| {' | '.join(map(str, figures))} |")


def _opened(url: str) -> str | optuna.storages.JournalStorage:
    path = url.removeprefix("journal://")
    return optuna.storages.JournalStorage(JournalFileBackend(path)) if path != url else url


if __name__ == "__main__":
    main()
