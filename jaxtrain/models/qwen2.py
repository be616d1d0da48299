"""Qwen2 and Qwen2.5 dense: Llama's blocks with biases on queries, keys and values alone (arXiv 2407.10671)."""

from dataclasses import dataclass
from functools import partial

from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors, layer_patterns
from jaxtrain.hf.hf_format import COMMON, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import rotary
from jaxtrain.models.llama import DenseConfig, dense, layer, written


@dataclass(frozen=True)
class Qwen2Config(DenseConfig):
    """Qwen2 and Qwen2.5."""

    name: str = "qwen2"


def _read(known: Keys, refuse: Refuse) -> Keys:
    return layer_patterns.late_window(known, refuse) | rotary("qwen2", known, refuse)


def with_late_window(c: DenseConfig) -> Keys:
    """Return the keys of config.json of rotary positions and of a window that the first layers may be without."""
    return written(c) | ({"use_sliding_window": True, "max_window_layers": c.global_first} if c.window else {})


def _layer(c: Qwen2Config, experts: bool) -> list[Entry]:
    return [*layer(c, experts), *decoder_tensors.QKV_BIASES]


FAMILY = Family(
    Qwen2Config, partial(dense, qkv_bias=True), tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("qwen2", "Qwen2ForCausalLM", COMMON, read=_read, write=with_late_window),))
