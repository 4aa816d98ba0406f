"""Recognises secrets by the names of keys and by patterns, and masks them in texts, URLs, commands and documents."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import quote, unquote

PLACEHOLDER = "(secret, not shown)"
"""The placeholder for the value of a secret key."""
MASK = "***"
"""The placeholder for the secret part of a text, such as a URL or a command."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SCHEME = re.compile(r"[A-Za-z][\w+.-]*://")
_URL_ENDS = re.compile(r"[\s\"]")
_NAME = re.compile(r"[\w.-]+")
_SECRET_WORD_ENDINGS = ("password", "passwd", "passphrase", "secret", "apikey", "accesskey")
_SECRET_LAST_WORDS = frozenset({
    "authorization", "bearer", "cookie", "credential", "credentials", "dsn", "passwords", "pwd", "secrets", "sig",
    "signature", "webhook",
})  # fmt: skip
_SECRET_ENDINGS = (
    "_access_key", "_access_key_id", "_account_key", "_api_key", "_connection_string", "_private_key", "_secret_key",
    "_shared_key", "_webhook_url",
)  # fmt: skip
_TOKEN = "token"
# Words before `token` that mark a token of text, not a credential.
_TEXT_TOKEN_PREFIXES = frozenset({
    "assistant", "audio", "begin", "boi", "bos", "cls", "decoder", "end", "eoi", "eom", "eos", "eot", "first", "image",
    "input", "last", "mask", "middle", "new", "next", "output", "pad", "padding", "per", "prefix", "prompt", "response",
    "score", "sep", "separator", "special", "start", "stop", "suffix", "think", "unk", "video",
})  # fmt: skip
_DIRECTORIES = frozenset({"PWD", "OLDPWD"})
# A shorter secret would also match unrelated text.
_MIN_SECRET_LENGTH = 6
# Tokens with a known prefix, masked everywhere: the hub's have 34 characters after `hf_` (a folder such as
# hf_transformers has fewer), and GitHub's.
_TOKENS = re.compile(r"\b(?:hf_[A-Za-z0-9]{30,}|gh[opusr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})")
# Credentials between `//` and `@`. In a web address, user and password may each be a token. In a database URL,
# SQLAlchemy parses all between the first colon and the last @ as the password (``sqlalchemy/engine/url.py``).
_WEB = re.compile(r"(?P<start>\bhttps?://)(?P<value>[^\s/\"]+)@")
_DATABASE = re.compile(r"(?P<start>\b(?!https?:)[A-Za-z][\w+.-]*://[^\s/:@?\"]*:)(?P<value>[^\s\"]*)@")
_QUERY = re.compile(r"(?P<start>[?&;](?P<name>[\w%.+-]+)=)(?P<value>[^&\s\"]*[^&\s\"'])")
_VALUE = r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|(?:Bearer|Basic)[ \t]+[^\s\"']+|[^\s,;)}\]\"']+)"
# In a parser's error "unexpected token: 'x'", the token is no secret.
_NOT_ERROR = r"(?!(?<=[Uu]nexpected )token\b)"
_ASSIGNED = re.compile(
    r"(?P<start>(?<![\w?&;%])(?<!\w-)" + _NOT_ERROR + r"(?P<name>[A-Za-z_][\w.-]*)[\"']?\]?[ \t]*[:=][ \t]*)" + _VALUE
)
_OPTION = re.compile(r"(?P<start>(?<![\w-])--(?P<name>[A-Za-z][\w-]*)[ \t]+)(?!--)" + _VALUE)
_PATTERNS = (_WEB, _DATABASE, _QUERY, _ASSIGNED, _OPTION)
_NOT_SECRET = frozenset({"", MASK, "None", "null", "True", "true", "False", "false", "(secret"})


def is_secret(name: str) -> bool:
    """Return whether a key, an argument, a variable or a parameter of a URL of this name holds a secret."""
    words = [word.lower() for word in _WORDS.findall(name)]
    while words and (words[-1].isdigit() or words[-1] == "value"):
        words.pop()
    if not words or name in _DIRECTORIES:
        return False
    last = words[-1]
    if last.endswith(_TOKEN):
        return (last.removesuffix(_TOKEN) or "".join(words[-2:-1])) not in _TEXT_TOKEN_PREFIXES
    if last.endswith(_SECRET_WORD_ENDINGS) or last in _SECRET_LAST_WORDS or (last == "pass" and name.isupper()):
        return True
    return f"_{'_'.join(words)}".endswith(_SECRET_ENDINGS)


def hidden(text: str, secrets: Collection[str] = ()) -> str:
    """Return a text, such as a message, with its secrets masked.

    Args:
        secrets: further secrets to mask, as :func:`secrets_in` returns them.
    """
    for secret in sorted(secrets, key=len, reverse=True):
        for spelling in (secret, quote(secret, safe=""), quote(secret)):
            text = text.replace(spelling, MASK) if len(secret) >= _MIN_SECRET_LENGTH else text
    text = _TOKENS.sub(MASK, text)
    for pattern in _PATTERNS:
        for start, end in reversed(list(_secret_spans(pattern, text))):
            text = text[:start] + MASK + text[end:]
    return text


def hidden_url(url: str) -> str:
    """Return a URL, or another text, with its secrets masked; spaces do not end the URL as they would in a text."""
    joined = _quote_breaks(url)
    shown = hidden(joined)
    return url if shown == joined else shown


def hidden_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command, variables before it included, with their secrets masked."""
    masked: list[str] = []
    follows_secret_option = False
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        secret = _NAME.fullmatch(name) is not None and is_secret(name)
        if follows_secret_option and not word.startswith("--"):
            masked.append(MASK)
        elif secret and value:
            masked.append(f"{word.removesuffix(value)}{MASK}")
        else:
            masked.append(f"{word.removesuffix(value)}{hidden_url(value)}" if "://" in value else hidden_url(word))
        follows_secret_option = secret and word.startswith("-") and not equals
    return tuple(masked)


def hidden_values(doc: Any, secrets: Collection[str] = (), *, secret: bool = False) -> Any:
    """Return a document of mappings and lists with :data:`PLACEHOLDER` for the values of secret keys.

    Args:
        secrets: further secrets to mask in its texts, as :func:`secrets_in` returns them.
        secret: whether the whole document is secret.
    """
    if isinstance(doc, Mapping):
        return {
            name: hidden_values(value, secrets, secret=secret or is_secret(str(name))) for name, value in doc.items()
        }
    if isinstance(doc, (list, tuple)):
        return type(doc)(hidden_values(each, secrets, secret=secret) for each in doc)
    if secret:
        return PLACEHOLDER if is_value(doc) else doc
    return hidden(doc, secrets) if isinstance(doc, str) else doc


def without_secrets(document: Any) -> Any:
    """Return a document of mappings and lists without its secret keys."""
    if isinstance(document, Mapping):
        return {
            name: without_secrets(value)
            for name, value in document.items()
            if not (is_secret(str(name)) and any(_values(value)))
        }
    if isinstance(document, (list, tuple)):
        return type(document)(map(without_secrets, document))
    return hidden(document) if isinstance(document, str) else document


def secret_keys(document: Mapping[Any, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the secret keys of a document that have a value."""
    for name, value in document.items():
        if is_secret(str(name)) and any(_values(value)):
            yield (str(name),)
        elif isinstance(value, Mapping):
            yield from ((str(name), *path) for path in secret_keys(value))


def secrets_in(source: Any) -> frozenset[str]:
    """Return the values of the secrets in a document, or in the words of a command."""
    if isinstance(source, Mapping):
        parts = (
            frozenset(map(str, _values(value))) if is_secret(str(name)) else secrets_in(value)
            for name, value in source.items()
        )
        return frozenset().union(*parts)
    if isinstance(source, (list, tuple)):
        values = (
            str(word) for before, word in pairwise(source) if _is_option(before) and not str(word).startswith("--")
        )
        return frozenset(values).union(*map(secrets_in, source))
    return frozenset(_secrets_in_text(_quote_breaks(source))) if isinstance(source, str) else frozenset()


def is_value(value: object) -> bool:
    """Return whether a value can be secret: it is neither a bool nor empty."""
    return value is not None and not isinstance(value, bool) and value != ""


def _is_option(word: object) -> bool:
    return isinstance(word, str) and word.startswith("--") and "=" not in word and is_secret(word)


def _quote_breaks(text: str) -> str:
    """Return a URL with the characters quoted that would end it within a text; another text unchanged."""
    return _URL_ENDS.sub(lambda found: quote(found[0]), text) if _SCHEME.match(text) else text


def _secret_spans(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each match of a pattern that is secret, without quotes around it."""
    position = 0
    while (match := pattern.search(text, position)) is not None:
        start, end = match.span("value")
        name = match.groupdict().get("name")
        if name is not None and not is_secret(unquote(name)):
            # The value of a name that is no secret may contain the name of one.
            position = start
            continue
        if text[start] in "\"'" and text[start] == text[end - 1] and end > start + 1:
            start, end = start + 1, end - 1
        if text[start:end] not in _NOT_SECRET:
            yield start, end
        position = match.end()


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _values(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _values(item)
    elif is_value(value):
        yield value


def _secrets_in_text(text: str) -> Iterator[str]:
    """Yield the secrets in a text, as written and URL-decoded."""
    for pattern in _PATTERNS:
        for start, end in _secret_spans(pattern, text):
            yield from (text[start:end], unquote(text[start:end]))
    yield from _TOKENS.findall(text)
