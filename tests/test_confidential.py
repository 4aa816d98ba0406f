"""Secrets are recognised by one rule, and similar texts are not masked."""

from __future__ import annotations

import pytest

from autotune.confidential import (
    MASK,
    PLACEHOLDER,
    hidden,
    hidden_url,
    hidden_values,
    hidden_words,
    is_secret,
    secret_keys,
    secrets_in,
    without_secrets,
)
from autotune.errors import AutotuneError


@pytest.mark.parametrize(
    "name",
    [
        "hub_token", "token", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "COMET_API_KEY", "api_key",
        "apiKey", "NEPTUNE_API_TOKEN", "AWS_SECRET_ACCESS_KEY", "aws_access_key_id", "AWS_SESSION_TOKEN", "password",
        "PGPASSWORD", "sslpassword", "MLFLOW_TRACKING_PASSWORD", "client_secret", "SMTP_PASS", "DB_PWD", "API_KEY_2",
        "AZURE_STORAGE_CONNECTION_STRING", "SLACK_WEBHOOK_URL", "SENTRY_DSN", "Authorization", "X-Amz-Signature",
        "--hub-token", "credentials", "user_token",
    ],
)  # fmt: skip
def test_a_name_that_lets_somebody_in_is_secret(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "eos_token", "pad_token", "bos_token", "image_token", "max_length", "tokenizer", "num_tokens", "token_type",
        "eos_token_id", "hub_model_id", "push_to_hub", "token_coverage", "dataset_text_field", "PWD", "OLDPWD",
        "TOKENIZERS_PARALLELISM", "num_input_tokens_seen", "megatron_lm_calculate_per_token_loss", "key", "author",
        "sequence_keys", "column_key", "hub_private_repo", "keys", "passes", "num_passes", "compass", "",
    ],
)  # fmt: skip
def test_a_name_that_only_looks_like_it_is_not(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql+psycopg://me:pw@host/name", "postgresql+psycopg://me:***@host/name"),
        ("postgresql://me:p/w:x@y@host/n", "postgresql://me:***@host/n"),
        ("postgresql://host/n?user=me&password=pw", "postgresql://host/n?user=me&password=***"),
        ("'postgresql://host/n?sslpassword=pw&sslmode=a'", "'postgresql://host/n?sslpassword=***&sslmode=a'"),
        ("mysql://host/n?ssl_ca=a&p%61ssword=pw", "mysql://host/n?ssl_ca=a&p%61ssword=***"),
        ("https://pw@host/x and https://me:pw@host/y", "https://***@host/x and https://***@host/y"),
        ("https://host/x.jsonl?X-Amz-Signature=pw&e=1", "https://host/x.jsonl?X-Amz-Signature=***&e=1"),
        ("HF_TOKEN=pw accelerate launch x.py", "HF_TOKEN=*** accelerate launch x.py"),
        ("trl sft --hub_token pw --seed 1", "trl sft --hub_token *** --seed 1"),
        ("# hub_token: pw", "# hub_token: ***"),
        ("-hub_token: pw", "-hub_token: ***"),
        ("trl sft --hub_token=pw --seed 1", "trl sft --hub_token=*** --seed 1"),
        ("# ours; before: hub_token=pw", "# ours; before: hub_token=***"),
        ("os.environ['HF_TOKEN'] = 'pw'", "os.environ['HF_TOKEN'] = '***'"),
        ('{"token": "pw", "a": 1}', '{"token": "***", "a": 1}'),
        ("unexpected hub_token: pw", "unexpected hub_token: ***"),
        ("the new token: pw", "the new token: ***"),
        ("Authorization: Bearer pw", "Authorization: ***"),
        (f"401 for hf_{'aB3' * 11}c", "401 for ***"),
    ],
)
def test_a_text_is_shown_without_what_is_secret_in_it(text: str, shown: str) -> None:
    assert hidden(text) == shown
    assert hidden(shown) == shown
    assert secrets_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:///a:b@c.db", "journal:///a/b.log", "postgresql://me@host/name", "grpc://host:13000", "eos_token: </s>",
        "http://host:8000/a", "no end-of-sequence token, which TRL adds", f"hub_token: {PLACEHOLDER}",
        "--hub_token --seed 1", "/data/hf_transformers/llama",
        "hub_token: null", "use_auth_token=True", "hf_model", "per_device_train_batch_size: 4", "pad_token='<pad>'",
        "git@github.com:a/b.git", "hub_token", "Unexpected token: 'x'", "unexpected token: Token('NAME', 'x')",
    ],
)  # fmt: skip
def test_a_text_without_secrets_stays_as_it_is(text: str) -> None:
    assert hidden(text) == hidden_url(text) == text
    assert secrets_in(text) == frozenset()


@pytest.mark.parametrize("password", ["a b", 'a"b', "a'b", "a#b", "a,b", "a&b=c", "a/b:c@d"])
def test_a_password_of_a_storage_is_hidden_whatever_it_has(password: str) -> None:
    shown = hidden_url(f"postgresql://me:{password}@host/name")
    assert shown == "postgresql://me:***@host/name"


def test_the_words_of_a_command_are_shown_without_what_is_secret_in_them() -> None:
    words = (
        "HF_TOKEN=pw",
        "A=1",
        "trl",
        "sft",
        "--hub_token",
        "pw",
        "--push_to_hub",
        "--api-key=pw",
        "--eos_token",
        "x",
    )
    assert hidden_words(words) == (
        f"HF_TOKEN={MASK}", "A=1", "trl", "sft", "--hub_token", MASK, "--push_to_hub", f"--api-key={MASK}",
        "--eos_token", "x",
    )  # fmt: skip
    assert secrets_in(words) == {"pw"}
    assert hidden_words(("--storage=postgresql://me:a b@h/n",)) == (f"--storage=postgresql://me:{MASK}@h/n",)


def test_documents_show_that_something_is_there_and_not_what() -> None:
    document = {
        "hub_token": "pw", "eos_token": "x", "env": {"HF_TOKEN": 123, "A": "1"}, "places": ["https://a:pw@h"],
        "token": None, "use_auth_token": True, "credentials": {"user": "me", "key": ["pw"]},
    }  # fmt: skip
    assert hidden_values(document) == {
        "hub_token": PLACEHOLDER, "eos_token": "x", "env": {"HF_TOKEN": PLACEHOLDER, "A": "1"}, "places": ["https://***@h"],
        "token": None, "use_auth_token": True, "credentials": {"user": PLACEHOLDER, "key": [PLACEHOLDER]},
    }  # fmt: skip
    assert list(secret_keys(document)) == [("hub_token",), ("env", "HF_TOKEN"), ("credentials",)]
    assert secrets_in(document) == {"pw", "123", "me", "a:pw"}
    assert without_secrets(document) == {
        "eos_token": "x", "env": {"A": "1"}, "places": ["https://***@h"], "token": None, "use_auth_token": True,
    }  # fmt: skip


def test_a_known_secret_is_hidden_wherever_it_is() -> None:
    known = secrets_in({"password": "p@ss/word", "token": "ab"})
    assert hidden("refused p@ss/word, p%40ss%2Fword about ab", known) == "refused ***, *** about ab"


def test_no_error_tells_a_secret() -> None:
    error = AutotuneError("postgresql://me:pw@h/n is down.", hint="Set HF_TOKEN=pw.")
    assert "pw" not in f"{error} {error.message} {error.hint} {error!r}"
