"""A failing storage gives one message with the cause."""

from __future__ import annotations

import resource
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy

from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.errors import AutotuneError, InputError
from autotune.study.backends import _engine_options, connected, is_in_memory
from autotune.study.problem import ProbeRun
from autotune.study.storage import check_storage
from tests.study.replayed import ReplayedTable
from tests.study.running import Run, probed


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "'nonsense' is not a storage URL"),
        ("nosuchdatabase://host/name", "is not a storage URL"),
        ("sqlite:////no/such/directory/study.db", "unable to open database file"),
        ("postgresql+pg8000://user:secret@host/name", "driver .* is not installed"),
        ("postgresql+pg8000://me@host/name?password=secret", "driver .* is not installed"),
        ("postgresql://me:se/@secret@host:port/name", "is not a storage URL"),
        ("postgresql+pg8000://me:my secret@host/name", "driver .* is not installed"),
        ("grpc://me:secret@host:port", "is not a storage URL"),
        ("journal:///no/such/directory/study.log", "No such file or directory"),
        ("journal://", "names no file"),
        ("journal://~nobody-has-this-name/study.log", "The home directory in .* is not known"),
        ("grpc://host:port", "is not a storage URL"),
    ],
)
def test_a_storage_that_cannot_be_opened_is_the_users_to_change(url: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        Run(url)(ReplayedTable())
    assert "secret" not in str(caught.value)
    assert caught.value.hint


def test_a_storage_is_checked_before_the_work_whose_results_it_is_to_keep(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unable to open database file"):
        check_storage("sqlite:////no/such/directory/study.db", "study", resume=False)
    kept = Run(f"sqlite:///{tmp_path / 'study.db'}")
    check_storage(kept.url, "s", resume=False)
    kept(ReplayedTable(), trials=1)
    with pytest.raises(InputError, match=r"already exists.*--resume"):
        check_storage(kept.url, "s", resume=False)
    check_storage(kept.url, "s", resume=True)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_text("not a database, and long enough to have a header " * 10)
    with pytest.raises(InputError, match="file is not a database"):
        Run(f"sqlite:///{tmp_path / 'study.db'}")(ReplayedTable())


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.log").write_text("nothing that Optuna wrote\nnor this\n")
    with pytest.raises(InputError, match=r"study\.log is not a journal of Optuna"):
        Run(f"journal://{tmp_path / 'study.log'}")(ReplayedTable())


def test_a_journal_is_named_by_a_path_that_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = Run("journal://study.log")(ReplayedTable(), trials=3)
    again = Run(f"journal://{tmp_path / 'study.log'}")(ReplayedTable(), trials=3, resume=True)
    assert again == first


def test_a_server_that_does_not_answer_is_told_at_once_and_in_one_message() -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed (extra `postgres`)")
    with pytest.raises(InputError, match="cannot be used") as caught:
        Run("postgresql+psycopg://user:secret@127.0.0.1:9/name")(ReplayedTable())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "resume", "attempts"),
    [
        ("server closed the connection unexpectedly", True, 3),
        ("connection failed: FATAL:  the database system is starting up", True, 3),
        ("connection failed: Connection refused", True, 3),
        ("connection failed: Connection refused", False, 1),
        ('connection failed: FATAL:  database "nmae" does not exist', True, 1),
    ],
)
def test_a_worker_that_joins_while_a_database_restarts_waits_for_it(
    said: str, resume: bool, attempts: int, durable: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable(ReplayedTable(), trials=1)
    asked = []

    class Restarting(optuna.storages.RDBStorage):
        def __init__(self, url: str, **options: Any) -> None:
            asked.append(url)
            if len(asked) < 3:
                raise sqlalchemy.exc.OperationalError("SELECT 1", {}, Exception(said))
            super().__init__(url, **options)

    monkeypatch.setattr(optuna.storages, "RDBStorage", Restarting)
    # Not a moment passes between the attempts.
    monkeypatch.setattr("autotune.study.backends.random.uniform", lambda *_: 0.0)
    with nullcontext() if attempts == 3 else pytest.raises(InputError, match="cannot be used"):
        durable(ReplayedTable(), trials=1, resume=resume)
    assert len(asked) == attempts


def test_a_worker_that_meets_another_making_the_tables_waits_however_long_its_first_attempt_took(
    durable: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, attempts = [0.0], []

    class MadeByAnother(optuna.storages.RDBStorage):
        def __init__(self, url: str, **options: Any) -> None:
            attempts.append(url)
            if len(attempts) == 1:
                seconds[0] += 60
                raise sqlalchemy.exc.IntegrityError("INSERT", {}, Exception("UNIQUE constraint failed"))
            super().__init__(url, **options)

    with monkeypatch.context() as patched:
        patched.setattr(optuna.storages, "RDBStorage", MadeByAnother)
        patched.setattr("autotune.study.backends.time.monotonic", lambda: seconds[0])
        check_storage(durable.url, "study", resume=True)
    assert len(attempts) == 2


def test_a_read_only_storage_is_told(durable: Run, tmp_path: Path) -> None:
    durable(ReplayedTable(), trials=1)
    read_only = Run(f"sqlite:///file:{tmp_path / 'study.db'}?mode=ro&uri=true")
    with pytest.raises(AutotuneError, match="attempt to write a readonly database"):
        read_only(ReplayedTable(), trials=2, resume=True)


def test_a_locked_storage_is_told(durable: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable(ReplayedTable(), trials=1)
    monkeypatch.setattr("autotune.study.backends._CREATION_SECONDS", 0.1)
    with closing(sqlite3.connect(tmp_path / "study.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(AutotuneError, match="database is locked"):
            Run(f"{durable.url}?timeout=0.05")(ReplayedTable(), trials=2, resume=True)


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Every SQLite database may grow to 60 pages: SQLite's own way to run into the end of a disk."""

    def limit(connection: sqlite3.Connection, record: object) -> None:
        connection.execute("PRAGMA max_page_count = 60")

    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "connect", limit)
    yield
    sqlalchemy.event.remove(sqlalchemy.engine.Engine, "connect", limit)


def test_a_full_disk_is_told_and_nothing_stored_is_lost(durable: Run, request: pytest.FixtureRequest) -> None:
    def verbose(run: ProbeRun, seconds_left: float | None) -> Measurement:
        reason = "x" * 500_000 if run.number == 1 else ""
        return Measurement(ProbeStatus.OK, reason, peak_bytes=1, tokens_per_second=1.0)

    request.getfixturevalue("small_disk")
    with pytest.raises(AutotuneError, match=r"database or disk is full.*--resume"):
        durable(verbose)


@pytest.mark.parametrize("room_bytes", [0, 5, 100])
def test_a_journal_goes_on_after_a_full_disk(room_bytes: int, tmp_path: Path) -> None:
    file = tmp_path / "study.log"
    url, (soft, hard) = f"journal://{file}", resource.getrlimit(resource.RLIMIT_FSIZE)
    study = optuna.create_study(storage=connected(url)[0], study_name="s")
    study.set_user_attr("before", 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + room_bytes, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            study.set_user_attr("lost", "x" * 500)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resumed = optuna.load_study(storage=connected(url)[0], study_name="s")
    resumed.set_user_attr("after", 2)
    assert optuna.load_study(storage=connected(url)[0], study_name="s").user_attrs == {"before": 1, "after": 2}


def test_a_journal_goes_on_after_a_loss_of_power_that_left_zeros_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "study.log"
    journal = Run(f"journal://{file}")
    first = journal(ReplayedTable(), trials=3)
    file.write_bytes(file.read_bytes() + bytes(4096))
    table = ReplayedTable()
    again = journal(table, trials=4, resume=True)
    assert again.records[: len(first.records)] == first.records
    assert b"\0" not in file.read_bytes()


def test_a_damaged_line_of_a_journal_is_named(tmp_path: Path) -> None:
    file = tmp_path / "study.log"
    journal = Run(f"journal://{file}")
    journal(ReplayedTable(), trials=1)
    lines = file.read_bytes().splitlines(keepends=True)
    for number in (4, len(lines)):
        damaged = b"".join([*lines[: number - 1], bytes(9) + lines[number - 1], *lines[number:]])
        file.write_bytes(damaged)
        message = rf"study\.log is damaged: line {number} is not an entry of Optuna\. Restore it from a copy"
        with pytest.raises(InputError, match=message):
            journal(ReplayedTable(), trials=2, resume=True)
        assert file.read_bytes() == damaged


@pytest.mark.parametrize("text", ["a word", "a word\n", "\n", "{}\n"])
def test_a_file_of_one_line_that_is_no_journal_is_refused_and_left_as_it_is(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text(text)
    with pytest.raises(InputError, match="mine is not a journal of Optuna"):
        Run(f"journal://{tmp_path / 'mine'}")(ReplayedTable())
    assert (tmp_path / "mine").read_text() == text


def test_an_edited_trial_is_named(durable: Run, tmp_path: Path) -> None:
    durable(ReplayedTable(), trials=3)
    with closing(sqlite3.connect(tmp_path / "study.db")) as other:
        other.execute("UPDATE trial_user_attributes SET value_json = '{}' WHERE key = 'measurement' AND trial_id = 2")
        other.commit()
    with pytest.raises(AutotuneError, match=r"Trial 1 of the study has an attribute that cannot be read: .*status"):
        durable(ReplayedTable(), trials=4, resume=True)
    with closing(sqlite3.connect(tmp_path / "study.db")) as other:
        other.execute("DELETE FROM trial_user_attributes WHERE key = 'purpose' AND trial_id = 1")
        other.commit()
    with pytest.raises(AutotuneError, match=r"Trial 0 of the study has no 'purpose'\. Restore the study from a copy"):
        durable(ReplayedTable(), trials=4, resume=True)


def test_trials_that_a_user_adds_to_the_study_stay_as_they_are(durable: Run) -> None:
    first = durable(ReplayedTable(), trials=3)
    mine = optuna.load_study(storage=durable.url, study_name="s")
    asked = mine.ask()
    mine.add_trial(optuna.trial.create_trial(value=1.0))
    assert durable(ReplayedTable(), trials=3, resume=True).records == first.records
    mine.tell(asked, 1.0)


def test_neither_logs_nor_warnings_of_optuna_are_shown(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    verbosity = optuna.logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome = run(ReplayedTable())
    assert len(probed(outcome)) > 1
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == verbosity


def test_a_postgresql_server_that_vanishes_is_given_up_within_a_minute_unless_the_url_has_another_time() -> None:
    psycopg = pytest.importorskip("psycopg")
    given = _engine_options("postgresql+psycopg://me@host/name")["connect_args"]
    assert given["tcp_user_timeout"] == 60_000
    assert given["keepalives_idle"] + given["keepalives_interval"] * given["keepalives_count"] == 60
    psycopg.conninfo.make_conninfo(**given)  # raises for an unknown parameter of libpq
    own = _engine_options("postgresql+psycopg://me@host/name?tcp_user_timeout=5000")["connect_args"]
    assert own == {name: value for name, value in given.items() if name != "tcp_user_timeout"}


@pytest.mark.parametrize(
    ("url", "in_memory"),
    [
        ("sqlite://", True),
        ("sqlite:///:memory:", True),
        ("sqlite:///file::memory:?uri=true", True),
        ("sqlite:///file:study?mode=memory&cache=shared&uri=true", True),
        ("sqlite:///file:study.db?uri=true", False),
        ("sqlite:///study.db", False),
        ("journal:///study.log", False),
    ],
)
def test_a_database_in_memory_is_known_by_its_url(url: str, in_memory: bool) -> None:
    assert is_in_memory(url) is in_memory


@pytest.mark.parametrize(
    ("url", "address"), [("grpc://[::1]:13001", ("[::1]", 13001)), ("grpc://host", ("host", 13000))]
)
def test_a_proxy_is_reached_by_the_address_of_its_url(
    url: str, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    class Proxy:
        def __init__(self, *, host: str, port: int) -> None:
            asked.append((host, port))

        def wait_server_ready(self, timeout: float) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(optuna.storages, "GrpcStorageProxy", Proxy)
    connected(url)
    assert asked == [address]


@pytest.mark.parametrize("url", ["sqlite:///{}/study.db", "journal://{}/study.log"])
def test_a_study_that_is_deleted_while_it_is_searched_is_told(url: str, tmp_path: Path) -> None:
    run, table = Run(url.format(tmp_path)), ReplayedTable()

    def deleting(item: ProbeRun, seconds_left: float | None) -> Measurement:
        if item.number == 2:
            storage, close = connected(run.url)
            optuna.delete_study(study_name="s", storage=storage)
            close()
        return table(item, seconds_left)

    with pytest.raises(AutotuneError, match="The study 's' is no longer in "):
        run(deleting)
