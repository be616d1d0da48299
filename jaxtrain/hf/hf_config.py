"""The `model` section of a config from a published model's config.json, and back.

What changes numbers and cannot be expressed is refused by name. A key that config.json leaves out has the default that
Hugging Face's transformers gives it for the model type. Each family says what its types have (`HFConfig`).
"""

import math
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from jaxtrain.base.annotations import Json, JsonMapping
from jaxtrain.config import family
from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.field_checks import most
from jaxtrain.config.hybrids.layer_pattern import PatternConfig
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import ROWS, DataConfig
from jaxtrain.errors import UserError, nearest_few
from jaxtrain.files import bounded_files
from jaxtrain.hf import defaults
from jaxtrain.hf.hf_format import HFConfig, Keys, Refuse
from jaxtrain.hf.own_head import has_own_head

FILE = "config.json"
# Keys that may be 0, or are no sizes; and those of which null means what a family derives.
_NO_SIZES = ("n_shared_experts", "first_k_dense_replace", "eos_token_id", "shared_intermediate_size",
             "moe_num_shared_experts", "num_dense_layers")
_DERIVED = ("num_key_value_heads", "head_dim", "n_inner", "q_lora_rank", "linear_num_key_heads",
            "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
# Keys of ours that published models have no word for, since they only shape training.
_OF_TRAINING = ("name", "mtp_loss_weight", "mtp_layers", "balance_loss", "router_z_loss", "capacity_factor",
                "router_bias_rate")


@cache
def types() -> Mapping[str, dict[str, HFConfig]]:
    """Return the published model types, each with the families that are published as this type, by name."""
    found: dict[str, dict[str, HFConfig]] = {}
    for name, each in family.families():
        for published in each.hf:
            found.setdefault(published.model_type, {})[name] = published
    return found


def family_of(kind: str, path: Path) -> tuple[str, HFConfig]:
    """Return the family of a model type: jaxtrain's, or that of another package."""
    (name, published), *others = types()[kind].items()
    if others and name not in family.FAMILIES.own:
        raise UserError(f"{path}", f"model_type={kind} is the type of the models {' and '.join(types()[kind])}, of "
                        "other packages", "uninstall one of the packages")
    if others:
        warnings.warn(f"model_type={kind} is read as model.name={name}; {' and '.join(dict(others))} of another "
                      "package has this type too, and should have one of its own", stacklevel=2)
    return name, published


def model_section(folder: str | Path) -> Keys:
    """Return the keys of a config's `model` section for the model in `folder`."""
    path = Path(folder) / FILE
    given = bounded_files.user_json(path, dict, "--config", "give a folder in Hugging Face's format")
    if given is None:
        fix = "give a folder in Hugging Face's format"
        if (path.parent / "adapter_config.json").is_file():
            fix = f"it has adapters: give that of their model, and --config.train.init_from={folder}"
        raise UserError("--config", f"there is no {path}", fix)
    try:
        given = _text_of({key: _plain(value) for key, value in given.items()}, path)
        kind = given.get("model_type")
        if kind is None and isinstance(given.get("model"), dict):
            raise UserError("--config", f"{folder} is the workdir of a run, not a published folder",
                            f"begin with it by train.init_from={folder}, or export it first")
        if not isinstance(kind, str) or kind not in types():
            said = kind if isinstance(kind, str) and len(kind) < 50 else defaults.shown(kind)
            raise UserError(f"{path}", f"model_type={said} is not one that jaxtrain has",
                            nearest_few(said, types(), "docs/model_types.md has all of them"))
        name, published = family_of(kind, path)
        section = _section(name, published, given, path)
        return section | published.beside(given, path.parent, section)
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path}", f"a value does not have the form expected ({error})", "download it again") from error


def _plain(value: Json) -> Json:
    """Return a value of config.json, without the form that transformers gives to numbers that JSON lacks."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    known = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
    if isinstance(value, dict) and value.keys() == {"__float__"} and value["__float__"] in [*known]:
        return known[value["__float__"]]
    return value


def _text_of(given: Keys, path: Path) -> Keys:
    """Return what a config.json says of the model of text, where that is a part of it."""
    kinds = [kind for kind, families in types().items() for published in families.values() if published.nested
             and published.nested == given.get("model_type")]
    if not kinds:
        return given
    both = defaults.filled(defaults.table()[given["model_type"]], given, path)
    text = both["text_config"] or {}
    kind = kinds[0]  # whatever it says: the class has one
    if len(kinds) > 1:
        kind = f"{text.get('model_type')}"
        if kind not in kinds:
            raise UserError(f"{path}", f"text_config is of model_type={defaults.shown(kind)}",
                            f"known: {', '.join(kinds)}")
    tied = defaults.filled(defaults.table()[kind], text, path, "text_config.")["tie_word_embeddings"]
    if both["tie_word_embeddings"] and not tied:  # the former counts, unless the files have an output projection
        text = text | {"tie_word_embeddings": not has_own_head(path.parent)}
    elif both["tie_word_embeddings"] is not tied:
        raise UserError(f"{path}", f"tie_word_embeddings={both['tie_word_embeddings']} is {tied} in text_config",
                        "use a model that jaxtrain can express")
    return text | {"model_type": kind}


def starting_config(folder: str) -> dict[str, Keys]:
    """Return the sections of a config that begins with the model in `folder` and its weights."""
    section = model_section(folder)
    other = sorted(path.name for end in ("bin", "pt", "pth", "gguf") for path in Path(folder).glob(f"*.{end}"))
    if other and not any(Path(folder).glob("*.safetensors")):
        raise UserError("--config", f"the weights in {folder} are not safetensors but {other[0]}",
                        "save them as safetensors, or move them away to begin with random ones")
    data = {"seq_len": min(DataConfig.seq_len, section["max_seq_len"])}
    if not family.config_class(section["name"]).text:
        model = family.config_of(section)
        data = {"seq_len": model.longest_row, "packing": ROWS[model.rows_of][0]}
    found = {"model": section, "data": data, "train": {"init_from": folder}}
    if is_reward_model(folder):
        found |= {"preference": {"loss": "reward"}, "data": found["data"] | {"packing": "pairs"}}
    return found


def is_reward_model(folder: str | Path) -> bool:
    """Return whether the model in `folder` is published as a classifier, as reward models are."""
    said = bounded_files.user_json(Path(folder) / FILE, dict, "--config", "download it again") or {}
    classes = said.get("architectures")
    return isinstance(classes, list) and any(f"{name}".endswith("ForSequenceClassification") for name in classes)


def _section(name: str, published: HFConfig, given: Keys, path: Path) -> Keys:
    if published.own_read is not None:
        return published.own_read(given, path)
    known = defaults.filled(defaults.of_type(published), given, path)

    def refuse(key: str, why: str) -> UserError:
        return UserError(f"{path}", f"{key}={defaults.shown(known.get(key))} {why}",
                         "use a model that jaxtrain can express")

    for key, allowed in published.fixed.items():
        if known.get(key, allowed[0]) not in allowed:
            raise refuse(key, f"cannot be expressed: only {allowed[0]!r} can")
    packed = (known.get("quantization_config") or {}).get("quant_method")
    if known.get("quantization_config") and not (published.quantized and packed == published.quantized):
        raise refuse("quantization_config", "cannot be expressed: only plain weights can")
    return {"name": name} | _sizes(name, published, known, refuse) | published.read(known, refuse)


def _sizes(name: str, published: HFConfig, known: Keys, refuse: Refuse) -> Keys:
    """Return the keys that have another name only, once they are sizes that a model can have."""
    found, limits, declared = {}, most(family.config_class(name)), defaults.of_type(published)["keys"]
    for key, ours in published.keys.items():
        if (value := known.get(key)) is None:
            if key not in _DERIVED and key in declared:
                raise refuse(key, "cannot be expressed")
            if key not in _DERIVED and not (published.like or published.model_type in defaults.table()):
                raise refuse(key, "is missing, and this type has no default for it")
            continue
        if type(value) is int and key not in _NO_SIZES and value < 1:
            raise refuse(key, "is not a size that a model has")
        if type(value) is int and value > limits.get(ours, value):
            raise refuse(key, f"is more than {limits[ours]:,}, the most that jaxtrain reads")
        found[ours] = value
    return found


def config_json(c: ModelConfig, reward_head: bool = False) -> Keys:
    """Return what config.json says of a model; raises UserError where the published model type cannot express it.

    `reward_head`: the model has one, and is published as a classifier with one label.
    """
    published = next((one for one in family.family(c.name).hf if one.describes(c)), None)
    if published is None:
        raise UserError("model.name", f"{c.name} has no published format", "keep it in jaxtrain's format")
    if published.own_write is not None:
        found = published.own_write(c)
    else:
        found = {"architectures": [published.architecture], "model_type": published.model_type}
        found |= {key: allowed[0] for key, allowed in published.fixed.items()}
        found |= {key: getattr(c, ours) for key, ours in published.keys.items()}
        found |= published.write(c)
    _check(c, published, found)
    if reward_head:
        if published.classifier is None or not c.text:
            raise UserError("preference.loss", f"transformers has no class for a reward model of type "
                            f"{published.model_type}", "keep it in jaxtrain's format, or begin with a model of another "
                            "family, such as llama")
        stem = published.architecture.removesuffix("ForCausalLM")
        found |= {"architectures": [published.classifier or f"{stem}ForSequenceClassification"],
                  "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    return found


def multipliers(c: ModelConfig) -> tuple[float, float, float]:
    """Return what muP multiplies embeddings, scores and logits by. Those of published models are 1."""
    embed, head = (c.growth.get(axis, 1.0) for axis in ("embed", "head_dim"))
    return embed**-0.5 if c.scaled_embeddings else 1.0, head**-0.5, 1 / embed if c.ties_head else 1.0


def _check(c: ModelConfig, published: HFConfig, written: JsonMapping) -> None:
    """Refuse a key that the published model type has no word for, unless it only shapes training."""
    kind, free = published.model_type, {*_OF_TRAINING, *published.unpublished}
    try:
        back = family.config_class(c.name)(**_section(c.name, published, dict(written), Path(FILE)))
    except UserError as error:
        raise UserError("model", f"it cannot be published as {kind} ({error})",
                        "keep it in jaxtrain's format") from None
    if c.experts.num and not c.experts.dense_layers and c.experts.every == 1:
        free.add("mlp_dim")  # which no layer has
    if multipliers(c) == (1, 1, 1):
        free.add("mup_base")  # it has shaped training only
    for key in c.__dataclass_fields__.keys() - free:
        same = isinstance(c, RotaryConfig) and (
            (c.rope_type == "ntk" and key.startswith("rope_")) or (bool(c.rope_short_factor) and key == "max_seq_len"))
        if isinstance(c, PatternConfig) and isinstance(back, PatternConfig) and key == "layer_pattern":
            same |= c.layer_kinds == back.layer_kinds
        same |= key == "global_every" and 0 not in {**c.windows, **back.windows}  # no layer is global
        if getattr(c, key) != getattr(back, key) and not same:
            raise UserError(f"model.{key}", f"{getattr(c, key)!r} cannot be published as {kind}",
                            "keep the model in jaxtrain's format")
    if bool(c.experts.bias_rate) != bool(back.experts.bias_rate):
        raise UserError("model.router_bias_rate", f"{c.experts.bias_rate} cannot be published as {kind}",
                        "keep the model in jaxtrain's format")
