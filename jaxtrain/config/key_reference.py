"""Print a reference of all keys of a config, made from the schema: defaults, accepted values and descriptions.

    python -m jaxtrain.config.key_reference

prints docs/keys.md. The description of a key is the comment on its line of the schema.
"""

import ast
import inspect
import io
import sys
import tokenize
from dataclasses import MISSING, Field, fields
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from jaxtrain.config.decoder_config import DecoderConfig
from jaxtrain.config.family import config_classes
from jaxtrain.config.field_checks import limits
from jaxtrain.config.sections import plug_in_sections

_HEAD = """\
# All keys of a config

Set any of them in a config file, or on the command line as `--config.SECTION.KEY=VALUE`. This page is made from the
schema by `python -m jaxtrain.config.key_reference`; [training options](training.md) explains the most common keys."""


def reference() -> str:
    """Return the page: a table for each section, and for `model` one for each family."""
    parts, families = [_HEAD], config_classes()
    for section, cls in plug_in_sections.sections().items():
        if section == "model":
            parts += ["## model", "`model.name` selects the model family. All families have these keys:",
                      _table(cls, section)]
            of_all = [field.name for field in fields(cls)]
            more = [field for field in fields(DecoderConfig) if field.name not in of_all]
            parts += ["Text decoders (language models) also have these keys:", _table(DecoderConfig, section, more)]
            for family in dict.fromkeys(families.values()):
                names = [name for name, cls in families.items() if cls is family]
                parent = next(base for base in family.__mro__[1:] if base in (*families.values(), DecoderConfig, cls))
                others = [name for name, cls in families.items() if cls is parent]
                known = {field.name: field.default for field in fields(parent)}
                if own := [field for field in fields(family) if field.name != "name"
                           and (field.name not in known or known[field.name] != field.default)]:
                    more = f" It has the keys of {' and '.join(others)}, and:" if others else ""
                    parts += [f"### model.name={' or '.join(names)}", f"{family.__doc__}{more}",
                              _table(family, section, own)]
        else:
            parts += [f"## {section}", inspect.cleandoc(cls.__doc__ or ""), _table(cls, section)]
    return "\n\n".join(parts) + "\n"


def _table(cls: type, section: str, only: list[Field] | None = None) -> str:
    about: dict[str, str] = {}
    known, parts = limits(cls), _parts(cls)
    for base in reversed([base for base in cls.__mro__ if base is not object]):
        about |= {name: comment for name, comment in _comments(base).items() if comment or name not in about}
    rows = ["| key | default | |", "|---|---|---|"]
    for field in fields(cls) if only is None else only:  # pyrefly: ignore[bad-argument-type]
        choices = known[field.name].choices if field.name in known else ()
        values = ", ".join(f"`{one!r}`" for one in choices) or parts.get(f"{section}.{field.name}", "")
        text = ". ".join(filter(None, (about.get(field.name, "").rstrip("."), values and f"One of {values}")))
        rows.append(f"| `{section}.{field.name}` | `{_default(field)}` | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def _default(field: Field) -> str:
    value: Any = field.default_factory() if field.default_factory is not MISSING else field.default
    return {True: "true", False: "false"}.get(value, repr(value)) if isinstance(value, bool) else repr(value)


def _comments(cls: type) -> dict[str, str]:
    """Return the comment behind each field, or those on the lines before it."""
    found, above = {}, []
    for line in inspect.getsource(cls).splitlines():
        code, comment = line, ""
        tokens = tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline)
        try:
            comment = next((token.string[1:].strip() for token in tokens if token.type == tokenize.COMMENT), "")
        except tokenize.TokenError:  # a line of something longer
            continue
        name, colon, _ = code.partition(":")
        if comment.startswith("pyrefly:"):
            continue
        if line.strip().startswith("#"):
            above.append(comment)
            continue
        if colon and name.startswith("    ") and name.strip().isidentifier() and "def " not in name:
            found[name.strip()] = " ".join([*above, comment] if comment else above)
        above = []
    return found


def _parts(cls: type) -> dict[str, str]:
    """Return the names of jaxtrain's own parts, for keys that are checked by a kind of part."""
    found = {}
    for node in ast.walk(ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls)))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "check":
            kind = attrgetter(ast.unparse(node.func.value))(SimpleNamespace(**vars(sys.modules[cls.__module__])))
            found[kind.key] = ", ".join(f"`{name!r}`" for name in kind.own)
    return found


if __name__ == "__main__":
    print(reference(), end="")
