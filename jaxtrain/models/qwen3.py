"""Qwen3 dense: Llama's blocks with RMSNorm on queries and keys, and an independent head width (arXiv 2505.09388)."""

from dataclasses import dataclass
from functools import partial

from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors, layer_patterns
from jaxtrain.hf.hf_format import COMMON, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import rotary
from jaxtrain.models.llama import DenseConfig, dense, layer
from jaxtrain.models.qwen2 import with_late_window


@dataclass(frozen=True)
class Qwen3Config(DenseConfig):
    """Qwen3."""

    name: str = "qwen3"


def _read(known: Keys, refuse: Refuse) -> Keys:
    return layer_patterns.late_window(known, refuse) | rotary("qwen3", known, refuse)


def _layer(c: Qwen3Config, experts: bool) -> list[Entry]:
    return [*layer(c, experts), *decoder_tensors.QK_NORMS]


FAMILY = Family(
    Qwen3Config, partial(dense, qk_norm=True), tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("qwen3", "Qwen3ForCausalLM", COMMON, read=_read, write=with_late_window),))
