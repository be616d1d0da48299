"""A model family as the rest of jaxtrain knows it, and the table of families, by `model.name`.

Everything of a family is one file, `jaxtrain/models/NAME.py`, whose `FAMILY` is one of these. The file is imported when
a config asks for the family, and imports JAX only when the model is built, so that a mistake in a config is told at
once. A package of another author names its own in the entry points of the group `jaxtrain.families`.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.base.plug_ins import Kind
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.errors import UserError
from jaxtrain.hf.hf_format import Entry, HFConfig, HFTensors


@dataclass(frozen=True)
class Family:
    """A model family.

    Args:
        config: the dataclass of its `model` section, with just the fields that it reads.
        build: returns the initialized module, `build(config, compute, rngs=rngs)`.
        hf: the model types of config.json that are this family.
        tensors: the tensors of its published models; None: no published format.
        objective: what it is trained on where it is not a decoder of text, as MODULE:CLASS with a method `of`.
        useful_flops: returns how many vectors of a row meet the matrix at a path, and the FLOPs of attention, from the
            config and the steps of a row; None: both follow from the parameters.
    """

    config: type[ModelConfig]
    build: Callable[..., Any]
    hf: tuple[HFConfig, ...] = ()
    tensors: HFTensors | None = None
    objective: str = ""
    useful_flops: Callable[[Any, int], tuple[Callable[[str], float], float]] | None = None


_OWN = (
    "gpt2",
    "llama", "qwen2", "qwen3", "arcee", "smollm3", "granite", "seed_oss", "ernie4_5", "phi3", "glm4", "olmo2", "olmo3",
    "exaone4", "gemma3", "gemma2", "cohere", "cohere2", "ministral3", "ministral", "hunyuan_v1_dense", "apertus",
    "nanochat", "olmo", "glm", "gemma", "starcoder2", "stablelm", "helium", "nemotron",
    "mixtral", "qwen3_moe", "qwen2_moe", "granitemoe", "glm4_moe", "dots1", "deepseek_v2", "deepseek_v3",
    "gpt_oss", "ernie4_5_moe", "minimax_m2", "afmoe", "hunyuan_v1_moe", "mistral4", "llama4",
    "olmoe", "flex_olmo", "phimoe", "glm4_moe_lite", "hy_v3", "solar_open", "exaone_moe", "youtu",
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "gemma4",
    "mamba2", "nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "lfm2", "lfm2_moe",
    "events", "clips", "siglip", "clip", "vision_language", "image_flow", "whisper")
_PLACES = {name: f"jaxtrain.models.{name}:FAMILY" for name in _OWN} | {
    "events": "jaxtrain.models.event_sequences:FAMILY"}
FAMILIES = Kind("model", "jaxtrain.families", "model.name", _PLACES, accepts=lambda part: isinstance(part, Family))


def names() -> list[str]:
    """Return the names of all families."""
    return FAMILIES.names()


@cache
def family(name: str) -> Family:
    """Return the family of this name."""
    return FAMILIES.load(name)


def config_class(name: str) -> type[ModelConfig]:
    """Return the dataclass of the `model` section of a family."""
    return family(name).config


def config_of(section: JsonMapping) -> ModelConfig:
    """Return the config that the keys of a `model` section describe."""
    return config_class(section["name"])(**section)


def config_classes() -> dict[str, type[ModelConfig]]:
    """Return the dataclass of the `model` section of every family."""
    return {name: each.config for name, each in families()}


def entries(c: ModelConfig, reward_head: bool = False) -> list[Entry]:
    """Return the published tensor of every parameter of a model; none for a family without a published format.

    `reward_head`: it has one in place of the output projection.
    """
    tensors = family(c.name).tensors
    return tensors.entries(c, reward_head) if tensors else []


def families() -> Iterator[tuple[str, Family]]:
    """Yield the name of each family, and the family; those of other packages that cannot be imported are left out."""
    for name in names():
        with contextlib.nullcontext() if name in FAMILIES.own else contextlib.suppress(UserError):
            yield name, family(name)
