"""The parts of the API's requests and answers, checked and in the terms of this package."""

import time

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.errors import UserError
from jaxtrain.serving.lora_engine import Adam, Adapters, Engine
from jaxtrain.serving.saved_adapters import TRAINING, Place, SavedAdapters

_ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


def call_of(body: JsonMapping) -> tuple[str, int]:
    """Return the model of a call, and the number of the call."""
    return f"{body['model_id']}", whole(body.get("seq_id"), "seq_id")


def lora_of(about: JsonMapping) -> LoraConfig:
    """Return the keys of saved adapters."""
    return LoraConfig(rank=about["rank"], alpha=float(about["alpha"]), targets=list(about["targets"]),
                      experts=about["experts"])


def adam_of(body: JsonMapping) -> Adam:
    """Return the settings of a step of the optimizer; refuse anything else."""
    if "optimizer_params" in body:
        raise UserError("optim_params", "this server has AdamW only", "give AdamParams")
    given = section(body, "adam_params")
    numbers = {name: given.get(name, default) for name, default in _ADAM.items()}
    for name, value in numbers.items():
        good = isinstance(value, int | float) and 0 <= value < (1 if name.startswith("beta") else 1e30)
        if not good:
            raise UserError(f"adam_params.{name}", f"{value!r} is out of range", "give 0 or more" + (
                ", and less than 1" if name.startswith("beta") else ""))
    return Adam(**numbers)


def section(body: JsonMapping, key: str) -> JsonMapping:
    """Return an object of a request, which may be left out; refuse anything else."""
    found = body.get(key)
    if found is not None and not isinstance(found, dict):
        raise UserError(key, f"{repr(found)[:50]} is not an object", "send what the package tinker 0.38 does")
    return found or {}


def check_optimizer(given: object) -> None:
    """Refuse an optimizer that is not there."""
    if isinstance(given, dict) and given.get("type", "adamw") != "adamw":
        raise UserError("optimizer_config", f"this server has no {repr(given['type'])[:50]}", "use AdamW, the default")


def all_listed(saved: SavedAdapters, model: str) -> list[tuple[Place, JsonObject]]:
    """Return all that is saved, of one model or of all, as lists of it have it."""
    return [(place, listed(saved, place, about)) for place, about in saved.all(model)]


def loaded(engine: Engine, saved: SavedAdapters, place: Place, about: JsonMapping, with_optimizer: bool) -> Adapters:
    """Return saved adapters, with the optimizer's state or a new one."""
    shape = engine.shape(lora_of(about))
    if with_optimizer and not about["optimizer"]:
        raise UserError("path", f"{place} has no state of an optimizer",
                        f"give a state that save_state saved, tinker://MODEL/{TRAINING}/NAME")
    wanted = {"params": shape.run.abstract.params}
    if with_optimizer:
        more = ("first", "second", *(("gradient",) if about.get("gradient") else ()))
        wanted |= dict.fromkeys(more, shape.abstract_gradient)
    found = saved.load(place, wanted)
    adapters = shape.around(found["params"])
    if with_optimizer:
        adapters.first, adapters.second, adapters.steps = found["first"], found["second"], about["steps"]
        adapters.gradient = found.get("gradient")
    return adapters


def listed(saved: SavedAdapters, place: Place, about: JsonMapping) -> JsonObject:
    """Return a saved folder as lists of them have it."""
    return {"checkpoint_id": f"{place.kind}/{place.name}", "tinker_path": f"{place}", "time": stamp(about["time"]),
            "checkpoint_type": "training" if place.kind == TRAINING else "sampler", "size_bytes": saved.size(place),
            "user_metadata": about.get("user_metadata") or None}


def stamp(seconds: float) -> str:
    """Return a time as the API writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def whole(value: object, key: str) -> int:
    """Return a whole number of a request; refuse anything else."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(key, f"{value!r} is not a whole number", "send what the package tinker 0.38 does")
    return value
