"""Read generation_config.json: how a published model asks to be generated with, with the defaults of transformers.

The most probable token is chosen unless the file says `do_sample`. A run that begins with a published model keeps the
file and is generated with in the same way.
"""

from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.errors import UserError
from jaxtrain.hf import generation_keys
from jaxtrain.hf.hf_config import FILE
from jaxtrain.hub.folders import published_files
from jaxtrain.hub.folders.published_files import GENERATION
from jaxtrain.hub.sampling import Sampling

# Of transformers, for keys that the file leaves out where it samples.
_SAMPLES = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}


def said_of(folder: str | Path) -> JsonObject | None:
    """Return what the published model in a folder, or that its run began with, says; None without such a model."""
    published = published_files.folder_of(folder)
    if published is None:
        return None
    said = published_files.json_of(published, GENERATION)
    if said:
        return said
    config = published_files.json_of(published, FILE)  # from which transformers makes one
    inner = config.get("text_config")
    config = (inner if isinstance(inner, dict) else {}) | config
    keys = "eos_token_id", "do_sample", *_SAMPLES, "repetition_penalty", *generation_keys.OF_TEXTS
    return {key: config[key] for key in keys if key in config}


def ends_of(folder: str | Path) -> list[int]:
    """Return the tokens that end a text of the published model in a folder, or that its run began with."""
    found = (said_of(folder) or {}).get("eos_token_id")
    ends = [] if found is None else found if isinstance(found, list) else [found]
    if wrong := [end for end in ends if type(end) is not int or not 0 <= end < 2**31]:
        raise UserError(f"{folder}", f"eos_token_id={wrong[0]!r} in its {GENERATION} is not a token",
                        "write a number or a list of numbers there")
    return sorted({*ends})


def sampling_of(said: JsonMapping | None, given: JsonMapping) -> Sampling:
    """Return how tokens are chosen.

    Args:
        said: what `said_of` returned. None: every token may be drawn, with its probability.
        given: what the user asks for by the names of `Sampling`; None: as the model says. Whoever gives anything but a
            repetition penalty wants to sample, too.
    """
    asked: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if said is None:
        return Sampling(**asked)
    samples = said.get("do_sample") or bool({*asked} & {*_SAMPLES})
    found: dict[str, Any] = {key: said.get(key) for key in ("repetition_penalty", *(_SAMPLES if samples else ()))}
    if said.get("do_sample"):
        found |= {key: plain for key, plain in _SAMPLES.items() if found[key] is None}
    found = {key: value for key, value in found.items() if value is not None}
    if wrong := next((key for key, value in found.items() if isinstance(value, bool) or not isinstance(
            value, int | float)), None):
        raise UserError(GENERATION, f"{wrong}={found[wrong]!r} is not a number", f"repair it, or give --{wrong}")
    chosen: dict[str, Any] = ({} if samples else {"temperature": 0.0}) | found | asked
    return Sampling(**chosen)


def not_applied(said: JsonMapping | None) -> list[str]:
    """Return the settings of a model that change texts and are not applied here, as KEY=VALUE."""
    return generation_keys.not_applied(said or {}, generation_keys.OF_TEXTS)
