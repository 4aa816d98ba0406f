"""Serves a journal through Optuna's gRPC proxy: path of the journal, port."""

from __future__ import annotations

import sys

import optuna
from optuna.storages.journal import JournalFileBackend


def main(journal: str, port: int) -> None:
    """Serve it, until it is ended."""
    storage = optuna.storages.JournalStorage(JournalFileBackend(journal))
    optuna.storages.run_grpc_proxy_server(storage, host="127.0.0.1", port=port)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
