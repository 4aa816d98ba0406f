"""Masks secrets in the text of a YAML configuration; line numbers stay the same."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import yaml

from autotune.confidential import PLACEHOLDER, hidden, hidden_url, hidden_values, is_secret, is_value, secrets_in
from autotune.core.files.yaml_text import yaml_line
from autotune.errors import InputError
from autotune.inspection.yaml_edit import Change, apply_changes, comments_outside, header_comment
from autotune.inspection.yaml_file import Node, YamlFile, parse_yaml

# An anchor is kept, since aliases refer to it; a tag would not fit the new value.
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")
_ANCHOR = re.compile(r"&\S+\s+")
_LINE_END = re.compile(r"\r\n|\r|\n")


def mask_secrets(file: YamlFile) -> YamlFile:
    """Return a configuration with its secrets masked, in its comments too."""
    changes = {change.start: change for change in _changes(file, secrets_in(dict(file.values)))}
    text = apply_changes(file.text, changes.values())
    if text == file.text:
        return file
    try:
        return parse_yaml(text, file.path)
    except InputError:
        # The masked text is not valid YAML, so the masked values are written as a new document.
        return parse_yaml(yaml.safe_dump(hidden_values(dict(file.values)), sort_keys=False), file.path)


def _changes(file: YamlFile, secrets: Collection[str]) -> Iterator[Change]:
    comments = [match.span() for match in comments_outside(file.text, file.root.scalars(), 0, len(file.text))]
    for node, secret in _scalars(file.root, secret=False):
        if secret and is_value(node.key):
            yield _masked(file.text, node, PLACEHOLDER)
        elif isinstance(node.key, str) and (masked := hidden_url(node.key)) != node.key:
            yield _masked(file.text, node, masked)
        elif (header := header_comment(file.text, node)) is not None:
            comments.append(header.span(1))
    for start, end in comments:
        if (masked := hidden(file.text[start:end], secrets)) != file.text[start:end]:
            yield Change(start, end, masked)


def _scalars(node: Node, *, secret: bool) -> Iterator[tuple[Node, bool]]:
    """Yield the scalars that are values in a node, and whether a key of theirs is secret."""
    target = node.resolved()
    if target.kind == "mapping":
        for key, value in target.entries:
            yield from _scalars(value, secret=secret or (isinstance(key.key, str) and is_secret(key.key)))
    elif target.kind == "sequence":
        for item in target.items:
            yield from _scalars(item, secret=secret)
    else:
        yield target, secret


def _masked(text: str, node: Node, value: str) -> Change:
    before = text[node.start : node.end]
    properties = _PROPERTIES.match(before)
    anchor = "".join(_ANCHOR.findall(properties[0])) if properties is not None else ""
    # Line ends of the old value are kept, so that the following lines keep their numbers.
    return Change(node.start, node.end, anchor + yaml_line(value) + "".join(_LINE_END.findall(before)))
