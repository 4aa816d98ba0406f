"""YAML of the files in a bundle: one key a line, in the order given, and each text as PyYAML reads it back."""

from __future__ import annotations

from typing import Any

import yaml

_NO_WRAPPING = 10_000


class _Dumper(yaml.SafeDumper):
    """PyYAML's, but for U+0085: it writes one in single quotes, and reads it there as a space."""


def _text_node(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if "\x85" in value else None)


_Dumper.add_representer(str, _text_node)


def yaml_text(document: object) -> str:
    """Return a document as YAML."""
    written: Any = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=_NO_WRAPPING
    )
    return str(written)
