"""A PostgreSQL server for tests, on a socket in a temporary directory."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

_OWNER = "postgres"


def lacking() -> str:
    """Return why no server can be started here, or an empty text."""
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed (extra `postgres`)"
    if _program("initdb") is None or _program("pg_ctl") is None:
        return "PostgreSQL is not installed (Debian's package `postgresql`)"
    if os.geteuid() == 0 and _OWNER not in {user.pw_name for user in pwd.getpwall()}:
        return f"PostgreSQL does not run as root, and there is no user {_OWNER}"
    return ""


class Postgres:
    """A server that is made when the object is, and runs until it is stopped."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pg-"))
        self._user = _OWNER if os.geteuid() == 0 else None
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self._run("initdb", "--auth=trust", "--no-sync", "--username=autotune", f"--pgdata={self._data}")
        self.start()

    @property
    def url(self) -> str:
        """The storage for Optuna."""
        return f"postgresql+psycopg://autotune@/postgres?host={self.folder}"

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = f"-c listen_addresses='' -c unix_socket_directories={self.folder} -c fsync=off"
        log = f"--log={self.folder / 'log'}"
        self._run("pg_ctl", "start", "--wait", f"--pgdata={self._data}", log, f"--options={options}")

    def stop(self) -> None:
        """Stop it at once, as a crash does; what was committed is recovered by the next start."""
        self._run("pg_ctl", "stop", "--wait", "--mode=immediate", f"--pgdata={self._data}")

    def remove(self) -> None:
        """Stop it, and remove its files."""
        self.stop()
        shutil.rmtree(self.folder)

    def _run(self, program: str, *arguments: str) -> None:
        found = _program(program)
        assert found is not None
        # The server that pg_ctl leaves behind keeps whatever pipe it is given open.
        with tempfile.TemporaryFile() as said:
            command = [found, *arguments]
            done = subprocess.run(
                command, stdout=said, stderr=said, user=self._user, cwd=self.folder, check=False, timeout=120
            )
            said.seek(0)
            assert done.returncode == 0, said.read().decode()


def _program(name: str) -> str | None:
    found = shutil.which(name)
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return found or (str(installed[-1]) if installed else None)
