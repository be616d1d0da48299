"""The config.json of an exported model: that of the published model it began with, where training did not change it.

A key that jaxtrain does not read, such as pad_token_id or transformers_version, is kept as it was published. A key that
shapes the model is kept too, in the spelling it was published in, unless the run's model differs in it.
"""

from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import Json, JsonMapping
from jaxtrain.config.family import config_of
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.hf.hf_config import FILE, config_json, model_section
from jaxtrain.hub.folders.published_files import json_of

Keys = dict[str, Any]
_DROPPED = ("quantization_config", "auto_map")  # of weights that are plain now, and of programs that are not copied
_OF_CLASSIFIERS = ("id2label", "label2id", "num_labels", "problem_type")
_KIND = ("model_type", "architectures")
_OF_THE_OUTER = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "transformers_version")
# Keys that say one thing together: if one of them is another by now, all are written anew.
_TOGETHER = (
    ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor"),
    ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern",
     "_sliding_window_pattern", "num_hidden_layers"),
    ("num_experts", "num_local_experts", "n_routed_experts"), ("n_positions", "n_ctx"), _KIND)


def write(folder: Path, base: Path | None, described: Keys, dtype: str, pads: bool = False) -> None:
    """Write the config.json of a trained model.

    Args:
        folder: to write it into, where the other small files are already.
        base: the folder with the small files of the published model that it began with, if any.
        described: what is to be said of the model.
        dtype: of its weights.
        pads: name a token that pads texts if none is: rewards are read at the last token that is none.
    """
    said = {} if base is None else _of_text(json_of(base, FILE))
    was = None if base is None else _published_as(base)
    found = described if was is None else _kept(said, was, described)
    atomic_files.write_json(folder / FILE, _finished(found, dtype, pads))
    if was is not None and _essence(_published_as(folder) or {}) != _essence(described):  # two spellings that conflict
        kept = {key: value for key, value in said.items() if key in _OF_THE_OUTER or key.endswith("_token_id")}
        atomic_files.write_json(folder / FILE, _finished(described | kept, dtype, pads))


def _kept(said: Keys, was: Keys, described: Keys) -> Keys:
    """Return what a published config.json says, with the keys in which the model is another one by now."""
    tokens = {key: value for key, value in described.items() if key.endswith("_token_id")}
    found = tokens | {key: value for key, value in said.items() if key not in _DROPPED}
    found |= _changes(said, was, described)
    classified, classifies = (f"{(each.get('architectures') or [''])[0]}".endswith("ForSequenceClassification")
                              for each in (said, described))
    if classified == classifies and "architectures" in said:
        return found
    found = {key: value for key, value in found.items() if key not in _OF_CLASSIFIERS}
    return found | {key: described[key] for key in (*_KIND, *_OF_CLASSIFIERS) if key in described}


def _published_as(folder: Path) -> Keys | None:
    """Return how a published model would be described here; None if it cannot be read."""
    try:
        section = model_section(folder)
        return config_json(config_of(section))
    except UserError:
        return None


def _essence(described: Keys) -> Keys:
    """Return what shapes a model, without what it is used for."""
    return {key: value for key, value in described.items()
            if key not in (*_OF_CLASSIFIERS, "architectures") and not key.endswith("token_id")}


def _of_text(said: Keys) -> Keys:
    """Return what a config.json says of a model that generates text, without the encoder of images around it."""
    inner = said.get("text_config")
    if said.get("model_type") != "gemma3" or not isinstance(inner, dict):
        return said
    kind = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
    return {key: said[key] for key in _OF_THE_OUTER if key in said} | inner | kind


def _changes(said: JsonMapping, was: Keys, now: Keys) -> Keys:
    """Return the keys in which the model is not the published one any more; None: those that do not apply to it."""
    before, after = _essence(was), _essence(now)
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    for together in _TOGETHER:
        if changed & {*together}:
            changed |= {*together}
    return {key: _joined(said.get(key), now.get(key)) for key in changed if key in now or key in said}


def _joined(said: Json, now: Json) -> Json:
    """Return a value that is written; of one encoder's section of a config, with what else was published in it."""
    return said | now if isinstance(said, dict) and isinstance(now, dict) and "hidden_size" in now else now


def _finished(found: Keys, dtype: str, pads: bool) -> Keys:
    """Return a config with the dtype of the weights, by the name that it has there already, and a token for padding."""
    if pads and found.get("pad_token_id") is None and (end := found.get("eos_token_id")) is not None:
        found = found | {"pad_token_id": end[0] if isinstance(end, list) else end}
    return of_dtype(found, dtype)


def of_dtype(found: Keys, dtype: str) -> Keys:
    """Return a config with the dtype of the weights, by the name that it has there already."""
    name = "torch_dtype" if "torch_dtype" in found and "dtype" not in found else "dtype"
    return {key: value for key, value in found.items() if key not in ("dtype", "torch_dtype")} | {name: dtype}
