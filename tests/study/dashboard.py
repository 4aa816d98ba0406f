"""Reads a study through optuna-dashboard's own application, called without a server."""

from __future__ import annotations

import io
import json
from typing import Any, cast
from wsgiref.util import setup_testing_defaults

import optuna
import optuna_dashboard


def shown(url: str) -> dict[str, Any]:
    """Return what the dashboard's pages get of the only study in a storage."""
    application = optuna_dashboard.wsgi(optuna.storages.RDBStorage(url))
    (study,) = _answer(application, "/api/studies")["study_summaries"]
    return _answer(application, f"/api/studies/{study['study_id']}")


def attributes(trial: dict[str, Any]) -> dict[str, str]:
    """Return the attributes of a trial as the dashboard shows them: texts as they are, all else as JSON."""
    return {item["key"]: item["value"] for item in trial["user_attrs"]}


def _answer(application: Any, path: str) -> dict[str, Any]:
    environment: dict[str, Any] = {"PATH_INFO": path, "wsgi.input": io.BytesIO()}
    setup_testing_defaults(environment)
    statuses: list[str] = []
    body = b"".join(application(environment, lambda status, *_: statuses.append(status)))
    assert statuses == ["200 OK"], body
    return cast("dict[str, Any]", json.loads(body))
