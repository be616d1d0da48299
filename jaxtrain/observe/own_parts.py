"""The user's own parts of a run, described in plain JSON: run.json keeps it, so that a workdir is not resumed with
another loss, optimizer or data than it was begun with.

A description says what a part is by the name of its class or function and by its plain settings (numbers, text, lists
of them). The code behind the names is not compared.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from jaxtrain.base.annotations import JsonMapping, PyTree
from jaxtrain.errors import UserError
from jaxtrain.observe.versions import version_of

Description = dict[str, Any]


def describe(part: object, leave_out: Iterable[str] = ()) -> Description:
    """Return the description of an object or a function.

    `leave_out`: fields of a dataclass that change nothing about what it computes.
    """
    if isinstance(part, functools.partial):
        bound = {f"argument {i}": value for i, value in enumerate(part.args)} | part.keywords
        return describe(part.func) | _plain(bound)
    if inspect.ismethod(part):
        return describe(part.__func__) | {"of": describe(part.__self__)}
    if inspect.isfunction(part):
        parameters = inspect.signature(part).parameters.values()
        defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
        return {"function": part.__qualname__} | _plain(defaults | dict(inspect.getclosurevars(part).nonlocals))
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    settings = {field.name: getattr(part, field.name) for field in fields if field.name not in set(leave_out)}
    return {"class": type(part).__qualname__} | _plain(settings)


def describe_objective(objective: object, recorded: JsonMapping) -> Description:
    """Return the description of an objective, which may have been written without a method for it.

    `recorded`: what it was when the workdir's run began, {} for a new one.
    """
    return objective.identity(recorded) if hasattr(objective, "identity") else describe(objective)


def describe_data(data: object) -> Description:
    """Return the description of a `BatchSource`: its class, and its `identity` where it has one."""
    found: Description = {"class": type(data).__qualname__}
    identity = getattr(data, "identity", None)
    try:
        return found if identity is None else found | {"identity": json.loads(json.dumps(identity))}
    except (TypeError, ValueError) as error:
        raise UserError("data", f"its identity is not plain JSON ({error})", "give text, numbers, lists and dicts of "
                        "them, such as a path and a seed") from None


def describe_optimizer(optimizer: optax.GradientTransformation, params: PyTree) -> Description:
    """Return the description of an optax transformation: the arrays that it keeps, and a digest of what it computes.

    The digest is that of the traced update, in which a learning rate or a schedule is a number like others. Versions of
    JAX and optax write it differently, so it is kept under theirs and compared under the same ones only.
    """
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    state = jax.eval_shape(optimizer.init, params)
    arrays = {jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype.name}{list(leaf.shape)}"
              for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}
    traced = jax.make_jaxpr(optimizer.update)(params, state, params)
    text = re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr))  # addresses of functions
    digest = _digest(text, *(np.asarray(const).tobytes() for const in traced.consts))
    versions = f"jax {version_of('jax')}, optax {version_of('optax')}"
    return {"state": _digest(json.dumps(arrays, sort_keys=True)), "update": {versions: digest}}


def difference(before: JsonMapping, now: JsonMapping) -> str:
    """Return in words the first difference between descriptions of all parts of two runs; "" if there is none."""
    for part in dict.fromkeys([*before, *now]):
        was, its = before.get(part), now.get(part)
        if was is None:
            return f"without {part}= of its own, this one has one"
        if its is None:
            return f"with {part}= of its own, this one has none"
        if part == "optimizer":
            both = was["update"].keys() & its["update"].keys()
            if was["state"] != its["state"] or any(was["update"][key] != its["update"][key] for key in both):
                return "with another optimizer=: its kind, its learning rate or its schedule differs"
        elif was != its:
            return _first(part, was, its)
    return ""


def _first(path: str, was: object, its: object) -> str:
    if isinstance(was, Mapping) and isinstance(its, Mapping):
        for key in dict.fromkeys([*was, *its]):
            if was.get(key) != its.get(key):
                return _first(f"{path}.{key}", was.get(key), its.get(key))
    return f"with {path}={_short(was)}, this one has {_short(its)}"


def _short(value: object) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {_short(each)}" for key, each in value.items()) + ")"
    return f"{value}"


def _plain(settings: Mapping[str, object]) -> Description:
    """Return those of the settings that JSON can hold as they are."""
    def plain(x):
        if isinstance(x, Mapping):
            return all(isinstance(key, str) and plain(each) for key, each in x.items())
        if isinstance(x, list | tuple):
            return all(map(plain, x))
        return x is None or type(x) in (bool, int, float, str)
    return json.loads(json.dumps({key: value for key, value in settings.items() if plain(value)}))


def _digest(text: str, *more: bytes) -> str:
    return hashlib.sha256(b"\0".join([text.encode(), *more])).hexdigest()[:16]
