"""Writes YAML with the keys in order, one a line, and strings that PyYAML's safe loader reads back unchanged."""

from __future__ import annotations

import re
from typing import Any

import yaml

_NO_WRAPPING = 1 << 30
_NOT_PLAIN = re.compile(r"[^\x20-\x7e\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd]")


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text_node(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # In other styles, PyYAML writes line ends unescaped, and reads U+0085 back as a space.
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if _NOT_PLAIN.search(value) else None)


_Dumper.add_representer(str, _text_node)


def yaml_text(document: object) -> str:
    """Return a document as YAML."""
    return _dump(document, in_one_line=False)


def yaml_line(value: object) -> str:
    """Return a value as YAML in one line, valid inside and outside of brackets."""
    return _dump([value], in_one_line=True).strip()[1:-1]


def _dump(document: object, *, in_one_line: bool) -> str:
    text: str = yaml.dump(
        document,
        Dumper=_Dumper,
        default_flow_style=in_one_line,
        allow_unicode=True,
        sort_keys=False,
        width=_NO_WRAPPING,
    )
    return text
