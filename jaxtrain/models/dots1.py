"""dots.llm1: Qwen3's attention and DeepSeek-V3's experts (arXiv 2506.05767)."""

from dataclasses import dataclass
from functools import partial

from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors, layer_patterns
from jaxtrain.hf.hf_format import BIASES, COMMON, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import rotary
from jaxtrain.models.deepseek_v3 import BIAS_RATE, EXPERT_KEYS
from jaxtrain.models.llama import dense, written
from jaxtrain.models.mixtral import ExpertsConfig


@dataclass(frozen=True)
class Dots1Config(ExpertsConfig):
    """dots.llm1."""

    name: str = "dots1"


def _read(known: Keys, refuse: Refuse) -> Keys:
    found = layer_patterns.late_window({"use_sliding_window": True} | known, refuse)
    if found.pop("global_first", 0):
        raise refuse("max_window_layers" if known["layer_types"] is None else "layer_types",
                     "cannot be expressed: all layers have the window, or none")
    return found | {"router": "sigmoid", "router_bias_rate": BIAS_RATE} | rotary("dots1", known, refuse)


def _write(c: Dots1Config) -> Keys:
    return written(c) | {"max_window_layers": 0 if c.window else c.num_layers}


def _layer(c: Dots1Config, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.QK_NORMS, *decoder_tensors.NORMS,
            *(decoder_tensors.experts(c) if experts else decoder_tensors.swiglu())]


FAMILY = Family(
    Dots1Config, partial(dense, qk_norm=True), tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("dots1", "Dots1ForCausalLM", COMMON | EXPERT_KEYS, fixed=BIASES, read=_read,
                 write=_write, classifier=None),))
