"""Gives the API reference the signatures of ``autotune.app.public.signature_from``, and Markdown in place of roles."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import griffe

from autotune.app import arguments
from autotune.app.public import descriptions

_SIGNATURE = re.compile(r"signature_from\((\w+)\)")
_ROLE = re.compile(r":(?:attr|class|func|meth|mod):`~?([\w.]+)`")
_KINDS: dict[object, griffe.ParameterKind] = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
}


class Signatures(griffe.Extension):
    """Replaces the one parameter of a public function by the fields of the dataclass that its decorator names."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: object) -> None:
        """Change the functions and docstrings of a package that has been read as a whole."""
        for item in _objects(pkg):
            if isinstance(item, griffe.Function):
                for decorator in item.decorators:
                    if (named := _SIGNATURE.fullmatch(str(decorator.value))) is not None:
                        _take(item, named[1])
            if item.docstring is not None:
                item.docstring.value = _ROLE.sub(r"`\1`", item.docstring.value).replace("::\n", ":\n")


def _take(function: griffe.Function, name: str) -> None:
    kind, read = getattr(arguments, name), function.module[name].parameters
    function.parameters = griffe.Parameters(
        *(
            # The annotation and the default as they are written, and not as they are evaluated.
            griffe.Parameter(
                each.name,
                annotation=read[each.name].annotation,
                kind=_KINDS[each.kind],
                default=None if each.default is inspect.Parameter.empty else read[each.name].default,
            )
            for each in inspect.signature(kind).parameters.values()
        )
    )
    listed = "\n".join(f"    {name}: {text}" for name, text in descriptions(kind).items())
    function.docstring.value += f"\n\nArgs:\n{listed}"


def _objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    for member in parent.members.values():
        if isinstance(member, griffe.Object):
            yield member
            yield from _objects(member)
