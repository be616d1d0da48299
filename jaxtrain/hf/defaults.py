"""The defaults, types and other names that Hugging Face's transformers has for the keys of a config.json.

`tests/config/families_truth.py` makes the table from the classes that transformers has for the model types.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import Json, JsonMapping, JsonObject
from jaxtrain.config.field_checks import LARGEST
from jaxtrain.errors import UserError
from jaxtrain.hf.hf_format import HFConfig

FILE = Path(__file__).with_suffix(".json")
# Keys that are read without their class declaring them.
_UNDECLARED = {
    "num_local_experts": ["int"], "num_experts": ["int"], "rope_scaling": ["dict", "null"],
    "rope_parameters": ["dict", "null"], "rope_theta": ["float", "null"], "rope_local_base_freq": ["float"],
    "partial_rotary_factor": ["float", "null"], "original_max_position_embeddings": ["int"],
    "sliding_window_pattern": ["int"], "layer_types": ["list of str", "null"], "head_dim": ["int", "null"],
    "quantization_config": ["dict", "null"]}
_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "null": "null",
          "list": "a list", "dict": "an object", "list of int": "a list of whole numbers",
          "list of float": "a list of numbers",
          "list of str": "a list of text"}
_SHOWN = 80  # characters of a value in a message
_LARGEST_FLOAT = 10**15  # no number is larger; bases of rotary positions for long contexts exceed 2^31


@cache
def table() -> JsonMapping:
    """Return for each model type the keys that its class declares (their default and the types that it accepts), the
    other names of keys, and the base of rotary positions."""
    return json.loads(FILE.read_bytes())


def of_type(published: HFConfig) -> Mapping[str, Any]:
    """Return the entry of the table for a model type, with what its family declares of it."""
    kind = published.like or published.model_type
    if published.like and kind not in table():
        raise UserError("model.name", f"the model type {published.model_type} is declared to be like {kind}, which is "
                        "not known", f"known: {', '.join(table())}")
    found = table().get(kind, {"keys": {}, "names": {}})
    own = {key: {"default": value, "type": found["keys"].get(key, {}).get("type") or _accepted(value)}
           for key, value in published.defaults.items()}
    return {**found, "keys": found["keys"] | own}


def _accepted(default: Any) -> list[str]:
    """Return the types that a key accepts whose default is this: those like it, or all where it is null."""
    return [kind for kind, test in _TESTS.items() if default is None or test(default)]


def filled(declared: Mapping[str, Any], given: JsonMapping, path: str | Path, inside: str = "") -> JsonObject:
    """Return the keys of a config.json with the defaults of its type, each under the name that its class declares.

    Args:
        declared: the entry of the table for its type.
        given: what the file says.
        path: the file, for messages.
        inside: the key of the object in the file that they are from, with a point.

    Raises:
        UserError: a value is not of a type that the class accepts.
    """
    keys, names = declared["keys"], declared["names"]
    found = {name: key["default"] for name, key in keys.items()}
    for given_as in sorted(given, key=lambda name: name in names):  # what is not declared is set last
        name = names.get(given_as, given_as)
        accepted = keys[name]["type"] if name in keys else _UNDECLARED.get(name)
        if accepted is not None and (why := misfit(given[given_as], accepted)):
            raise UserError(f"{path}", f"{inside}{given_as}={shown(given[given_as])} {why}",
                            "correct it, or download it again")
        found[name] = given[given_as]
    return found


def misfit(value: Json, accepted: list[str]) -> str:
    """Return why a value is of none of the accepted types, as a phrase; "" if it is of one."""
    limit = LARGEST if "int" in accepted else _LARGEST_FLOAT
    if type(value) in (int, float) and not abs(value) <= limit and {"int", "float"} & {*accepted}:
        return f"is not a number up to {limit}"
    if any(_TESTS[kind](value) for kind in accepted):
        return ""
    return f"is not {' or '.join(_WORDS[kind] for kind in accepted)}"


def shown(value: object) -> str:
    """Return a value as a message shows it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


_TESTS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int, "bool": lambda value: type(value) is bool,
    "float": lambda value: type(value) in (int, float) and math.isfinite(value),
    "str": lambda value: type(value) is str, "null": lambda value: value is None,
    "list": lambda value: type(value) is list, "dict": lambda value: type(value) is dict,
    "list of int": lambda value: type(value) is list and all(type(one) is int for one in value),
    "list of float": lambda value: type(value) is list and all(type(one) in (int, float) for one in value),
    "list of str": lambda value: type(value) is list and all(type(one) is str for one in value)}
