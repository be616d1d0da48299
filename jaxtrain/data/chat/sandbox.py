"""Compile chat templates in jinja2's sandbox, with bounds on the steps that one rendering takes and on its texts.

The bounds count instead of measuring time, so that the same records are dropped on every machine. What they do not
catch ends with the process that renders (`template_worker`), which has little memory and time.
"""

import datetime
import functools
import json
import re
import string
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from jaxtrain.data.chat.marks import BREAK, CLOSE, OPEN
from jaxtrain.data.chat.template_limits import LONGEST, STEPS

TODAY = datetime.date(2024, 7, 26)  # a fixed date, the one that Llama's templates use without a clock
_POWER = 64  # the largest exponent
_BITS = 2**15  # of a whole number
_DIGITS = 4  # of a width in a format: no text of a conversation needs more
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.]*?(?:\d{5}|\*)")  # a larger width, in a format of the operator %
_SIZED = ("batch", "center", "indent", "round", "slice", "truncate", "wordwrap")  # filters that take a width or a count


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates cannot reach out of it, run without end or fill the memory."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    used = 0  # steps of the current rendering; whoever renders sets it to 0

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name)
        given: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": TODAY.strftime}
        self.globals |= given
        self.filters |= {name: _sized(self.filters[name]) for name in _SIZED}
        self.filters |= {"format": _formatted, "tojson": tojson}

    def compiled(self, source: str) -> Any:
        """Return a template; its loops count their repetitions."""
        return self.from_string(_Bounding().visit(self.parse(source)))

    def call(self, context: Any, called: Any, /, *args: Any, **keys: Any) -> Any:
        """Call what a template calls, and count it."""
        self._count()
        method = getattr(called, "__wrapped__", called)  # jinja2 wraps `format`
        if isinstance(text := getattr(method, "__self__", None), str):
            _check_sizes((*args, *keys.values()))
            if method.__name__ in ("format", "format_map"):
                _check_fields(text)
        return super().call(context, called, *args, **keys)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`, unless the result would be too large."""
        sizes = [len(side) if isinstance(side, str | list | tuple) else 0 for side in (left, right)]
        times = max((side for side in (left, right) if isinstance(side, int)), default=0)
        if (sum(sizes) > LONGEST if operator == "+" else
                sum(sizes) * times > LONGEST if operator == "*" else
                not isinstance(right, int) or abs(right) > _POWER or times > 2**_POWER if operator == "**" else
                isinstance(left, str) and _PERCENT.search(left)):
            raise TemplateError(f"{operator} makes something too large")
        if operator == "*" and sum(side.bit_length() for side in (left, right) if isinstance(side, int)) > _BITS:
            raise TemplateError("* makes something too large")
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


def _raise_exception(message: object) -> None:
    raise TemplateError(message if isinstance(message, str) else f"{message}")


def _sized(do: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that takes no number beyond `LONGEST`."""
    @functools.wraps(do)  # which copies what jinja2 wants to know about it, too
    def sized(*args: Any, **keys: Any) -> Any:
        _check_sizes((*args[1:], *keys.values()))
        return do(*args, **keys)
    return sized


def _check_sizes(args: Iterable[Any]) -> None:
    """Refuse numbers that are a width or a count, as that of `ljust`, and make something too large."""
    if any(isinstance(one, int) and abs(one) > LONGEST for one in args):
        raise TemplateError(f"a width or count is too large (more than {LONGEST:,})")


def _check_fields(text: str) -> None:
    """Refuse wide fields in what the method `format` is called on."""
    for _, _, spec, _ in string.Formatter().parse(text):
        if any(len(width) > _DIGITS for width in re.findall(r"\d+", spec or "")):
            raise TemplateError("format makes something too large")


def _formatted(text: Any, *args: Any, **keys: Any) -> str:
    """Do what the filter `format` does, except for wide fields."""
    if _PERCENT.search(f"{text}"):
        raise TemplateError("format makes something too large")
    return do_format(text, *args, **keys)


def tojson(value: object, ensure_ascii: bool = False, indent: int | str | None = None,
           separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Return JSON, with the arguments that Hugging Face's filter takes."""
    if len(indent) > 100 if isinstance(indent, str) else (indent or 0) > 100:
        raise TemplateError("indent is too large")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace("\\ufdd2", BREAK)


class Generation(Extension):
    """The jinja2 extension for {% generation %} blocks, which surrounds their content with marks."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser):
        """Return the nodes of a block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (OPEN, CLOSE))
        return nodes.Scope([begin, *body, end], lineno=line)
