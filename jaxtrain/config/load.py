"""Read a config file and dotted overrides into a checked `Config`; every mistake is reported in one sentence."""

import ast
import json
import math
import runpy
import traceback
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from jaxtrain.base import arguments
from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.config.family import config_class, config_classes, names
from jaxtrain.config.field_checks import limits, within_bounds
from jaxtrain.config.schema import AXES, Config, TrainConfig, length_given_twice
from jaxtrain.config.sections import plug_in_sections
from jaxtrain.config.sections.earlier_keys import as_named_now
from jaxtrain.errors import UserError, nearest


def load_config(path: str | Path, overrides: JsonObject | None = None) -> Config:
    """Read a config file, optionally with `:variant`, and apply overrides such as {"mesh.tensor": 2}.

    In place of its path, a config that comes with jaxtrain has a name, such as "gpt" or "gpt:tiny". The config.json of
    a run is a config file too. "hf:FOLDER" is the model of a folder in Hugging Face's format, with
    `train.init_from` set to its weights.
    """
    arguments.is_path("--config", path, "give the name of a config such as gpt, or its path")
    return make_config(read_config(path), overrides)


def read_config(path: str | Path) -> JsonObject:
    """Return what a config file says, by section, before defaults and checks."""
    if str(path).startswith("hf:"):
        from jaxtrain.config.hub_names import folder
        from jaxtrain.hf import hf_config

        return hf_config.starting_config(folder(str(path).removeprefix("hf:"), "--config"))
    file, _, variant = str(path).partition(".py:")
    file = Path(file if file.endswith((".py", ".json")) else file + ".py")
    if not file.is_file():
        from jaxtrain.files import shipped_configs

        if (named := shipped_configs.found(str(path))) is None:
            from jaxtrain.config.suggestions import missing_config

            raise missing_config(str(path))
        file, variant = named
    filled = _run(file, variant)
    if hasattr(filled, "to_dict"):
        filled = filled.to_dict()
    if not isinstance(filled, dict):
        raise UserError("--config", f"get_config of {file} returned {filled!r}", "return a ConfigDict with sections")
    return filled


def _run(file: Path, variant: str) -> Any:
    """Return what this file says, or its get_config; reports whatever it raises in one line, since it is user code."""
    try:
        if file.suffix == ".json":
            return as_named_now(json.loads(file.read_bytes()))
        get_config = runpy.run_path(str(file)).get("get_config")
        if get_config is None:
            raise UserError("--config", f"{file} has no get_config function", "define get_config(variant=None)")
        return get_config(variant) if variant else get_config()
    except UserError:
        raise
    except Exception as error:
        if type(error) is ValueError:  # how a file refuses a variant, in its own words
            raise UserError("--config", str(error), f"see {file}") from error
        frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1] if frames else None
        raise UserError("--config", f"{file} raised {type(error).__name__}: {error}",
                        f"see its line {line}" if line else "fix it") from error


def make_config(values: JsonObject, overrides: JsonObject | None = None) -> Config:
    """Return a checked `Config` from nested dicts and dotted overrides, whose values may be command-line text."""
    fix = 'give a dict such as {"train": {"steps": 10}}'
    arguments.is_mapping("config", values, fix)
    arguments.is_mapping("overrides", overrides or {}, 'give a dict such as {"train.steps": 10}')
    sections = {section.name: {} for section in fields(Config)[:-1]}
    plugged = _plugged(values, overrides or {})
    sections |= {name: {} for name in plugged}
    for section, keys in values.items():
        if section not in sections:
            raise UserError(section, "there is no such key", nearest(section, sections))
        if section == "mesh" and isinstance(keys, str) and keys in _MESHES:
            keys = {keys: True}
        if not isinstance(keys, dict):
            raise UserError(section, f"{keys!r} is not a section", "give a mapping from keys to values")
        arguments.is_mapping(section, keys, fix)
        sections[section].update(keys)
    sections["train"] = _one_length(sections["train"], overrides or {})
    for key, value in (overrides or {}).items():
        section, _, name = key.partition(".")
        if section not in sections:
            from jaxtrain.config.suggestions import nearest_key

            raise UserError(key, "there is no such key", nearest_key(key) or nearest(section, sections))
        if key == "mesh" and str(value) in _MESHES:  # regardless of the sizes in the file that it chooses
            chosen = *_MESHES[value], *_MESHES
            sections["mesh"] = {name: given for name, given in sections["mesh"].items() if name not in chosen}
            sections["mesh"][value] = True
            continue
        if not name:
            raise UserError(section, "it is a section, not a key",
                            f"give {section}.KEY=VALUE{', mesh=auto or mesh=hsdp' * (section == 'mesh')}")
        table, _, entry = name.partition(".")
        if entry and (section, table) in _TABLES:
            before = sections[section].get(table, {})
            sections[section][table] = {**(before if isinstance(before, dict) else {}),
                                        entry: _ENTRIES.get(section, _literal)(value)}
        elif section == "data" and name.startswith("mixture."):
            sections[section]["mixture"] = _mixed(sections[section].get("mixture", {}), key, name.split(".")[1:], value)
        else:
            sections[section][name] = _Text(value) if isinstance(value, str) else value
    _resolve_fractions(sections)
    types = get_type_hints(Config) | {"model": _family(sections["model"])} | plugged
    made = {section: _section(types[section], section, keys) for section, keys in sections.items()}
    return Config(plug_ins={name: made.pop(name) for name in plugged}, **made)


def _plugged(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, type]:
    """Return the classes of the sections that parts of other packages have, of those that are asked for."""
    given = {name: {**keys} for name, keys in values.items() if isinstance(keys, dict)}
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        given.setdefault(section, {})[name] = value
    return plug_in_sections.asked(given, [name for name in (*values, *given) if name not in plug_in_sections.OWN])


def _one_length(train: JsonObject, overrides: JsonObject) -> JsonObject:
    """Return the section `train` of a file without the length of the run that overrides give in the other unit."""
    keys = "steps", "epochs"
    for given in (train, {key: overrides.get(f"train.{key}") for key in keys}):
        steps, epochs = (_literal(given.get(key)) for key in keys)
        if steps and epochs and isinstance(epochs, int | float):
            raise length_given_twice(steps, epochs)
    other = {f"train.{key}": keys[1 - n] for n, key in enumerate(keys)}
    dropped = [other[key] for key, value in overrides.items() if key in other and _literal(value)]
    return {key: value for key, value in train.items() if key not in dropped}


def _resolve_fractions(sections: dict[str, JsonObject]) -> None:
    """Replace numbers of steps that are given as fractions, such as 0.05, by that part of train.steps.

    With train.epochs they stay fractions until the number of steps is known.
    """
    for section, name in _FRACTIONS:
        part = _literal(sections[section].get(name))
        if not _is_fraction(part):
            continue
        if _literal(sections["train"].get("epochs")):
            sections[section][name] = _Fraction(part)
        else:
            steps = _coerce("train.steps", sections["train"].get("steps", TrainConfig.steps), int)
            sections[section][name] = _part_of(steps, part)


def _is_fraction(value: object) -> bool:
    return isinstance(value, float) and 0 < value < 1


def _part_of(steps: int, part: float) -> int:
    return max(0, min(steps, max(1, round(part * steps))))


def with_steps(config: Config, steps: int) -> Config:
    """Return a config with so many steps in place of its train.epochs."""
    sections = {section: getattr(config, section) for section in ("train", *(name for name, _ in _FRACTIONS))}
    sections["train"] = replace(sections["train"], steps=steps, epochs=0.0)
    for section, name in _FRACTIONS:
        if _is_fraction(part := getattr(sections[section], name)):
            sections[section] = replace(sections[section], **{name: _part_of(steps, part)})
    return replace(config, **sections)


def _mixed(before: Any, key: str, path: list[str], value: object) -> JsonObject:
    """Return the mixture with NAME.weight, NAME.epochs or NAME.source set; `data.mixture.NAME=W` sets the weight."""
    if len(path) > 2 or not all(path):
        raise UserError(key, "there is no such key", "give data.mixture.NAME.weight=NUMBER")
    before = _literal(before) if isinstance(before, _Text) else before
    before = before if isinstance(before, dict) else {}
    name, entry = path[0], before.get(path[0], {})
    entry = dict(entry) if isinstance(entry, dict) else {"weight": entry}
    if len(path) == 1 and isinstance(value := _literal(value), dict):
        return {**before, name: {**entry, **value}}
    what = path[1] if len(path) == 2 else "weight"
    return {**before, name: {**entry, what: value if what == "source" else _literal(value)}}


def diff(config: Config, base: Config) -> dict[str, tuple[Json, Json]]:
    """Return the dotted keys in which two configs differ, as (value, base value)."""
    a, b = config.to_dict(), base.to_dict()
    return {f"{s}.{k}": (v, was) for s, keys in a.items() for k, v in keys.items() if v != (was := b.get(s, {}).get(k))}


class _Fraction(float):
    """A part of the number of steps of a run, where that number is not known yet."""


class _Text(str):
    """A value from the command line, parsed as a literal where the field is not text."""


def _family(keys: JsonObject) -> type:
    """Return the class that model.name selects; refuses a key of other families, and names those."""
    name = keys.get("name", "gpt2")
    if not isinstance(name, str):
        raise UserError("model.name", f"there is no model {name!r}", nearest(str(name), names()))
    own = {field.name for field in fields(config_class(name))}
    for key in keys:
        having = [] if key in own else [other for other, cls in config_classes().items()
                                        if key in {field.name for field in fields(cls)}]
        if having:
            others = f" or one of {len(having) - 4} others" if len(having) > 4 else ""
            raise UserError(f"model.{key}", f"{name} has no such key",
                            f"remove it, or use {' or '.join(having[:4])}{others}")
    return config_class(name)


def _section(cls: type, section: str, keys: JsonObject):
    hints = get_type_hints(cls)
    types = {field.name: hints[field.name] for field in fields(cls)}
    if unknown := [name for name in keys if name not in types]:
        from jaxtrain.config.suggestions import nearest_in

        raise UserError(f"{section}.{unknown[0]}", "there is no such key", nearest_in(section, unknown[0], types))
    if section not in plug_in_sections.OWN:
        plug_in_sections.check(section, cls, types, keys)
    values = {name: _coerce(f"{section}.{name}", value, types[name]) for name, value in keys.items()}
    within_bounds(cls, section, values)
    return cls(**values)


def _coerce(key: str, value: object, wanted: Any) -> Any:
    wanted = get_origin(wanted) or wanted
    if isinstance(value, _Fraction):
        return float(value)
    if wanted is str:
        if isinstance(value, str):
            return str(value)
    else:
        if isinstance(value, _Text) and not (wanted is float and "," in value):
            value = _literal(value)
        if wanted is list and isinstance(value, tuple | str):
            value = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)
        if wanted is float and type(value) is int:
            return float(value)
        if wanted is int and type(value) is float and value.is_integer():
            return int(value)  # 1e6 steps
        if type(value) is wanted and (wanted is not float or math.isfinite(value)):
            return value
    raise UserError(key, f"{str(value)!r} is not {_KIND[wanted]}", f"give {_KIND[wanted]}")


def _literal(text: Any) -> Any:
    """Parse command-line text as a literal, where text is not wanted."""
    if not isinstance(text, str):
        return text
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return str(text)


# Keys whose entries can be given one by one, and how the text of an entry is read where that is not as a literal.
_MESHES = {"auto": AXES, "hsdp": ("data", "fsdp")}  # written mesh=NAME, and the axes whose sizes they choose
_TABLES = {("mesh", "overrides"), ("train", "compiler_options"), ("model", "mup_base"), ("model", "categories")}
_ENTRIES = {"mesh": str, "train": lambda value: value}
_FRACTIONS = [(section, name) for section, cls in get_type_hints(Config).items()
              for name, declared in limits(cls).items() if declared.of_steps]
_KIND = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", dict: "a mapping",
         list: "a list"}

