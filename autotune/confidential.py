"""The one rule for secrets, and the text that replaces them wherever something is shown, written or sent."""

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
_BREAKS = re.compile(r"[\s\"]")
_NAME = re.compile(r"[\w.-]+")
_ENDINGS = ("password", "passwd", "passphrase", "secret", "apikey", "accesskey")
_LAST = frozenset({
    "authorization", "bearer", "cookie", "credential", "credentials", "dsn", "passwords", "pwd", "secrets", "sig",
    "signature", "webhook",
})  # fmt: skip
_TAILS = (
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
# A shorter text is found by chance in texts that have nothing to do with it.
_SHORTEST = 6
# Tokens that are known by how they begin, wherever they are: those of the hub, which have 34 characters behind `hf_`
# (a folder such as hf_transformers has fewer), and of GitHub.
_TOKENS = re.compile(r"\b(?:hf_[A-Za-z0-9]{30,}|gh[opusr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})")
# Between `//` and `@`. Of a web address either part may be a token; of a database's, SQLAlchemy takes all between the
# first colon and the last @ for the password (``sqlalchemy/engine/url.py``).
_WEB = re.compile(r"(?P<start>\bhttps?://)(?P<value>[^\s/\"]+)@")
_DATABASE = re.compile(r"(?P<start>\b(?!https?:)[A-Za-z][\w+.-]*://[^\s/:@?\"]*:)(?P<value>[^\s\"]*)@")
_QUERY = re.compile(r"(?P<start>[?&;](?P<name>[\w%.+-]+)=)(?P<value>[^&\s\"]*[^&\s\"'])")
_VALUE = r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|(?:Bearer|Basic)[ \t]+[^\s\"']+|[^\s,;)}\]\"']+)"
# Parsers complain of an "unexpected token: 'x'", which is one of a text.
_OF_PARSERS = r"(?!(?<=[Uu]nexpected )token\b)"
_ASSIGNED = re.compile(
    r"(?P<start>(?<![\w?&;%])(?<!\w-)" + _OF_PARSERS + r"(?P<name>[A-Za-z_][\w.-]*)[\"']?\]?[ \t]*[:=][ \t]*)" + _VALUE
)
_OPTION = re.compile(r"(?P<start>(?<![\w-])--(?P<name>[A-Za-z][\w-]*)[ \t]+)(?!--)" + _VALUE)
_PATTERNS = (_WEB, _DATABASE, _QUERY, _ASSIGNED, _OPTION)
_NO_VALUES = frozenset({"", MASK, "None", "null", "True", "true", "False", "false", "(secret"})


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
    if last.endswith(_ENDINGS) or last in _LAST or (last == "pass" and name.isupper()):
        return True
    return f"_{'_'.join(words)}".endswith(_TAILS)


def hidden(text: str, known: Collection[str] = ()) -> str:
    """Return a text, such as a message, without what is secret in it.

    Args:
        known: secrets that it may have anywhere (:func:`secrets_in`).
    """
    for secret in sorted(known, key=len, reverse=True):
        for spelling in (secret, quote(secret, safe=""), quote(secret)):
            text = text.replace(spelling, MASK) if len(secret) >= _SHORTEST else text
    text = _TOKENS.sub(MASK, text)
    for pattern in _PATTERNS:
        for start, end in reversed(list(_places(pattern, text))):
            text = text[:start] + MASK + text[end:]
    return text


def hidden_url(url: str) -> str:
    """Return a URL, or another text, without its secrets; a URL alone may have spaces, which end a URL in a text."""
    joined = _joined(url)
    shown = hidden(joined)
    return url if shown == joined else shown


def hidden_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command, variables before it included, without what is secret in them."""
    found: list[str] = []
    follows = False
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        named = _NAME.fullmatch(name) is not None and is_secret(name)
        if follows and not word.startswith("--"):
            found.append(MASK)
        elif named and value:
            found.append(f"{word.removesuffix(value)}{MASK}")
        else:
            found.append(f"{word.removesuffix(value)}{hidden_url(value)}" if "://" in value else hidden_url(word))
        follows = named and word.startswith("-") and not equals
    return tuple(found)


def hidden_values(document: Any, known: Collection[str] = (), *, secret: bool = False) -> Any:
    """Return a document of mappings and lists with :data:`PLACEHOLDER` for the values of secret keys.

    Args:
        known: secrets that its texts may have anywhere (:func:`secrets_in`).
        secret: whether all of it is secret.
    """
    if isinstance(document, Mapping):
        return {
            name: hidden_values(value, known, secret=secret or is_secret(str(name))) for name, value in document.items()
        }
    if isinstance(document, (list, tuple)):
        return type(document)(hidden_values(each, known, secret=secret) for each in document)
    if secret:
        return PLACEHOLDER if is_value(document) else document
    return hidden(document, known) if isinstance(document, str) else document


def without_secrets(document: Any) -> Any:
    """Return a document of mappings and lists without its secret keys."""
    if isinstance(document, Mapping):
        return {
            name: without_secrets(value)
            for name, value in document.items()
            if not (is_secret(str(name)) and any(_leaves(value)))
        }
    if isinstance(document, (list, tuple)):
        return type(document)(map(without_secrets, document))
    return hidden(document) if isinstance(document, str) else document


def secret_keys(document: Mapping[Any, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the secret keys in the mappings of a document, as far as they have a value."""
    for name, value in document.items():
        if is_secret(str(name)) and any(_leaves(value)):
            yield (str(name),)
        elif isinstance(value, Mapping):
            yield from ((str(name), *path) for path in secret_keys(value))


def secrets_in(given: Any) -> frozenset[str]:
    """Return the secrets in a document, or in the words of a command: the values alone."""
    if isinstance(given, Mapping):
        parts = (
            frozenset(map(str, _leaves(value))) if is_secret(str(name)) else secrets_in(value)
            for name, value in given.items()
        )
        return frozenset().union(*parts)
    if isinstance(given, (list, tuple)):
        behind = (
            str(word) for before, word in pairwise(given) if _is_option(before) and not str(word).startswith("--")
        )
        return frozenset(behind).union(*map(secrets_in, given))
    return frozenset(_in_text(_joined(given))) if isinstance(given, str) else frozenset()


def is_value(value: object) -> bool:
    """Return whether something is there that can be secret: no switch, and no empty value."""
    return value is not None and not isinstance(value, bool) and value != ""


def _is_option(word: object) -> bool:
    return isinstance(word, str) and word.startswith("--") and "=" not in word and is_secret(word)


def _joined(text: str) -> str:
    """Return a URL without characters that would end it within a text; another text unchanged."""
    return _BREAKS.sub(lambda found: quote(found[0]), text) if _SCHEME.match(text) else text


def _places(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each secret in a text, without quotes around it."""
    place = 0
    while (found := pattern.search(text, place)) is not None:
        start, end = found.span("value")
        name = found.groupdict().get("name")
        if name is not None and not is_secret(unquote(name)):
            # What stands behind a name may be another.
            place = start
            continue
        if text[start] in "\"'" and text[start] == text[end - 1] and end > start + 1:
            start, end = start + 1, end - 1
        if text[start:end] not in _NO_VALUES:
            yield start, end
        place = found.end()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif is_value(value):
        yield value


def _in_text(text: str) -> Iterator[str]:
    """Yield the secrets that the patterns find in a text, as written and with the escapes of a URL decoded."""
    for pattern in _PATTERNS:
        for start, end in _places(pattern, text):
            yield from (text[start:end], unquote(text[start:end]))
    yield from _TOKENS.findall(text)
