"""Removes the values of secret keys from a YAML configuration; line numbers stay the same."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import yaml

from autotune.confidential import PLACEHOLDER, hidden, hidden_url, hidden_values, is_secret, is_value, secrets_in
from autotune.core.yaml_text import yaml_line
from autotune.errors import InputError
from autotune.inspection.yaml_edit import Change, changed, comments_outside, header_comment
from autotune.inspection.yaml_file import Node, YamlFile, parsed

# An anchor has to stay, since aliases name it; a tag would not fit the new value.
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")
_ANCHOR = re.compile(r"&\S+\s+")
_LINE_END = re.compile(r"\r\n|\r|\n")


def withheld(file: YamlFile) -> YamlFile:
    """Return a configuration with placeholders for its secrets, in its comments too."""
    found = {change.start: change for change in _changes(file, secrets_in(dict(file.values)))}
    text = changed(file.text, found.values())
    if text == file.text:
        return file
    try:
        return parsed(text, file.path)
    except InputError:
        # The masked text is not valid YAML: write the masked values anew.
        return parsed(yaml.safe_dump(hidden_values(dict(file.values)), sort_keys=False), file.path)


def _changes(file: YamlFile, known: Collection[str]) -> Iterator[Change]:
    comments = [found.span() for found in comments_outside(file.text, file.root.scalars(), 0, len(file.text))]
    for node, secret in _scalars(file.root, secret=False):
        if secret and is_value(node.key):
            yield _replaced(file.text, node, PLACEHOLDER)
        elif isinstance(node.key, str) and (shown := hidden_url(node.key)) != node.key:
            yield _replaced(file.text, node, shown)
        elif (header := header_comment(file.text, node)) is not None:
            comments.append(header.span(1))
    for start, end in comments:
        if (shown := hidden(file.text[start:end], known)) != file.text[start:end]:
            yield Change(start, end, shown)


def _scalars(node: Node, *, secret: bool) -> Iterator[tuple[Node, bool]]:
    """Yield the values in a node that are no collections, and whether a key around them is secret."""
    found = node.resolved()
    if found.kind == "mapping":
        for key, value in found.entries:
            yield from _scalars(value, secret=secret or (isinstance(key.key, str) and is_secret(key.key)))
    elif found.kind == "sequence":
        for item in found.items:
            yield from _scalars(item, secret=secret)
    else:
        yield found, secret


def _replaced(text: str, node: Node, value: str) -> Change:
    before = text[node.start : node.end]
    properties = _PROPERTIES.match(before)
    kept = "".join(_ANCHOR.findall(properties[0])) if properties is not None else ""
    # What stood on several lines does, so that every line keeps its number.
    return Change(node.start, node.end, kept + yaml_line(value) + "".join(_LINE_END.findall(before)))
