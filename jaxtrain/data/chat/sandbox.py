"""Compile chat templates in jinja2's sandbox, with bounds on the steps that one rendering takes and on its texts.

The bounds count instead of measuring time, so that the same records are left out on every machine.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

STEPS = 200_000  # repetitions of loops and calls in one rendering
LONGEST = 2**26  # characters of a text, or items of a list, that is put together
_POWER = 64  # the largest exponent
_WIDE = re.compile(r"\d{5}|\*")  # in a format: a width that no text of a conversation needs


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates cannot reach out of it, run without end or fill the memory."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    used = 0  # steps of the current rendering; whoever renders sets it to 0

    def __init__(self, generation: type[Extension], given: dict[str, Any]):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[generation, loopcontrols])
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name)
        self.globals.update(given)

    def compiled(self, source: str) -> Any:
        """Return a template; its loops count their repetitions."""
        return self.from_string(_Bounding().visit(self.parse(source)))

    def call(self, *args: Any, **keys: Any) -> Any:
        """Call what a template calls, and count it."""
        self._count()
        return super().call(*args, **keys)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`, unless the result would be too large."""
        sizes = [len(side) if isinstance(side, str | list | tuple) else 0 for side in (left, right)]
        times = max((side for side in (left, right) if isinstance(side, int)), default=0)
        if (sum(sizes) > LONGEST if operator == "+" else
                sum(sizes) * times > LONGEST if operator == "*" else
                not isinstance(right, int) or abs(right) > _POWER or times > 2**_POWER if operator == "**" else
                isinstance(left, str) and _WIDE.search(left)):
            raise TemplateError(f"{operator} makes something too large")
        return super().call_binop(context, operator, left, right)

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a loop, and count them."""
        for item in items:
            self._count()
            yield item

    def joined(self, *parts: Any) -> str:
        """Return the parts as one text, which may not be too long."""
        texts = [str(part) for part in parts]
        if sum(map(len, texts)) > LONGEST:
            raise TemplateError("~ makes something too large")
        return "".join(texts)

    def _count(self) -> None:
        self.used += 1
        if self.used > STEPS:
            raise TemplateError(f"it takes more than {STEPS:,} steps")


class _Bounding(NodeTransformer):
    """Put the counters into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _call("counted", [node.iter])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes)


def _call(name: str, args: list[Any]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)


def tojson(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
           separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Return JSON, with the arguments that Hugging Face's filter takes."""
    if len(indent) > 100 if isinstance(indent, str) else (indent or 0) > 100:
        raise TemplateError("indent is too large")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
