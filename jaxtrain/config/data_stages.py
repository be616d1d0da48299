"""Data stages (`data.stages`): changes of source weights, row length and batch size during a run.

A stage inherits what it does not name from the one before. It begins at a step, or at the first step after a number of
tokens. Where rows have several lengths, the longest is the *unit*: what is shuffled and counted, and read part after
part by shorter rows. So a change of length within a run loses nothing and repeats nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.base.annotations import Json, JsonMapping
from jaxtrain.config.schema import DataConfig
from jaxtrain.errors import UserError, nearest

SOURCE_KEYS = ("source", "weight", "epochs")
STAGE_KEYS = ("from_step", "from_tokens", "weights", "seq_len", "global_batch_size", "new_epoch")


@dataclass(frozen=True)
class Source:
    """One source of a mixture."""

    name: str
    source: str  # as in data.source
    weight: float  # its share of the rows, relative to the weights of the others
    epochs: float | None  # dropped after this many passes; None: never


@dataclass(frozen=True)
class Stage:
    """The settings from step `start` until the next stage."""

    start: int
    seq_len: int
    batch: int
    weights: Mapping[str, float]  # of all sources; 0: unused in this stage
    unit: int  # tokens that are shuffled together: the longest row of this era
    era: int  # how often all sources have been restarted


def sources(config: DataConfig) -> tuple[Source, ...]:
    """Return the mixture sorted by name, or the single source as a mixture."""
    if not config.mixture:
        return (Source("", config.source, 1.0, None),)
    return tuple(_source(name, entry) for name, entry in sorted(config.mixture.items()))


def stages(config: DataConfig) -> tuple[Stage, ...]:
    """Return all stages, in order."""
    weights = {source.name: source.weight for source in sources(config)}
    if not any(weights.values()):
        raise UserError("data.mixture", "all weights are 0", "give one source a weight")
    seq_len, batch, start, tokens, era = config.seq_len, config.global_batch_size, 0, 0, 0
    found = [(0, seq_len, batch, dict(weights), 0)]
    for number, entry in enumerate(config.stages):
        key = f"data.stages[{number}]"
        _check(key, entry, STAGE_KEYS)
        begins = _begin(key, entry, start, tokens, seq_len * batch)
        tokens += (begins - start) * seq_len * batch
        start = begins
        seq_len, batch = _size(key, entry, "seq_len", seq_len), _size(key, entry, "global_batch_size", batch)
        for name, weight in _mapping(f"{key}.weights", entry.get("weights", {})).items():
            if name not in weights:
                raise UserError(f"{key}.weights", f"data.mixture has no {name!r}", nearest(name, weights))
            weights[name] = _number(f"{key}.weights.{name}", weight)
        if not any(weights.values()):
            raise UserError(f"{key}.weights", "all are 0", "give one source a weight")
        if not isinstance(entry.get("new_epoch", False), bool):
            raise UserError(f"{key}.new_epoch", f"{entry['new_epoch']!r} is not true or false", "use true or false")
        era += entry.get("new_epoch", False)
        found.append((start, seq_len, batch, dict(weights), era))
    longest = {era: max(stage[1] for stage in found if stage[4] == era) for *_, era in found}
    made = tuple(Stage(*stage[:4], unit=longest[stage[4]], era=stage[4]) for stage in found)
    _check_units(config, made)
    return made


def history(config: DataConfig, manifests: Mapping[str, str], steps: int) -> Json:
    """Return, as plain JSON, all that decides which rows the first `steps` steps had.

    Args:
        manifests: the manifest of each source.
    """
    past = [stage for stage in stages(config) if stage.start < steps]
    used = [one for one in sources(config) if any(stage.weights[one.name] for stage in past)]
    return {"seed": config.seed, "packing": config.packing,
            "sources": {one.name: [manifests.get(one.name), one.epochs] for one in used},
            "stages": [[stage.start, stage.seq_len, stage.batch, stage.unit, stage.era,
                        {name: weight for name, weight in stage.weights.items() if weight}] for stage in past]}


def _source(name: str, entry: Json) -> Source:
    key = f"data.mixture.{name}"
    if isinstance(entry, int | float):  # shorthand for a source whose path is its name
        entry = {"weight": entry}
    _check(key, entry, SOURCE_KEYS)
    source = entry.get("source", name)
    if not isinstance(source, str):
        raise UserError(f"{key}.source", f"{source!r} is not text", "give what data.source takes")
    epochs = _number(f"{key}.epochs", entry.get("epochs", 0))
    return Source(name, source, _number(f"{key}.weight", entry.get("weight", 1)), epochs or None)


def _begin(key: str, entry: JsonMapping, start: int, tokens: int, per_step: int) -> int:
    """Return the step at which a stage begins, after one that began at `start` after `tokens`."""
    given = [name for name in ("from_step", "from_tokens") if name in entry]
    if len(given) != 1:
        raise UserError(key, "it does not set when it begins" if not given else "it sets twice when it begins",
                        "give from_step or from_tokens")
    number = _number(f"{key}.{given[0]}", entry[given[0]])
    if number != int(number):
        raise UserError(f"{key}.{given[0]}", f"{number} is not a whole number", "give a whole number")
    begins = int(number) if given[0] == "from_step" else start + math.ceil((number - tokens) / per_step)
    if begins <= start:
        raise UserError(f"{key}.{given[0]}", f"it begins at step {begins} and the stage before at {start}",
                        "give stages in order, each at a step of its own")
    return begins


def _check_units(config: DataConfig, made: tuple[Stage, ...]) -> None:
    for number, stage in enumerate(made):
        key = "data" if not number else f"data.stages[{number - 1}]"
        if stage.unit == stage.seq_len:
            continue
        if config.packing != "concat":
            raise UserError("data.packing",
                            f"{config.packing} packs sequences of one length, and data.stages has several",
                            "use concat, or new_epoch=true where the length changes")
        if stage.unit % stage.seq_len or stage.batch % (stage.unit // stage.seq_len):
            raise UserError(f"{key}.seq_len", f"{stage.batch} sequences of {stage.seq_len} tokens are not a whole "
                            f"number of the longest sequences, {stage.unit}", "choose a length that divides the "
                            "longest and a global_batch_size that the quotient divides")


def _check(key: str, entry: Json, known: tuple[str, ...]) -> None:
    for name in _mapping(key, entry):
        if name not in known:
            raise UserError(f"{key}.{name}", "there is no such key", nearest(name, known))


def _mapping(key: str, entry: Json) -> JsonMapping:
    if not isinstance(entry, Mapping):
        raise UserError(key, f"{entry!r} is not a mapping", "give keys and values")
    return entry


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UserError(key, f"{value!r} is not a valid number", "give 0 or more")
    return value


def _size(key: str, entry: JsonMapping, name: str, before: int) -> int:
    value = entry.get(name, before)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{key}.{name}", f"{value!r} is not a valid size", "give a whole number above 0")
    return value
