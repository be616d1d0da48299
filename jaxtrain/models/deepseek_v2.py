"""DeepSeek-V2: latent attention, and experts by softmax scores, of all or of the best groups (arXiv 2405.04434)."""

from dataclasses import dataclass, replace

from jaxtrain.config.family import Family
from jaxtrain.config.model_config import Experts
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import BIASES, COMMON, HFConfig, Keys, Refuse
from jaxtrain.models.deepseek_v3 import (
    EXPERT_KEYS,
    LATENT_KEYS,
    DeepseekV3Config,
    deepseek_v3,
    latent_layer,
    latents,
    written_latents,
)

_OF_GROUPS = ("n_group", "topk_group", "norm_topk_prob")  # keys that are read with others, or by nobody


@dataclass(frozen=True)
class DeepseekV2Config(DeepseekV3Config):
    """DeepSeek-V2, whose groups of experts are as good as their best expert."""

    name: str = "deepseek_v2"
    normalize_router: bool = False  # whether the weights of the experts chosen for a token are normalized to sum to 1

    @property
    def experts(self) -> Experts:
        """The routed experts."""
        return replace(super().experts, group_best=1)


def _read(known: Keys, refuse: Refuse) -> Keys:
    found = latents("deepseek_v2", known, refuse)
    if known["topk_method"] == "greedy":
        return found
    if known["topk_method"] != "group_limited_greedy":
        raise refuse("topk_method", "cannot be expressed: it is not greedy or group_limited_greedy")
    for key in ("n_group", "topk_group"):
        if (known[key] or 0) < 1:
            raise refuse(key, "is not a number of groups")
    return found | {"expert_groups": known["n_group"], "expert_groups_used": known["topk_group"]}


def _write(c: DeepseekV2Config) -> Keys:
    way = "greedy" if c.expert_groups == 1 else "group_limited_greedy"
    return written_latents(c) | {"topk_method": way, "n_group": c.expert_groups, "topk_group": c.expert_groups_used,
                                 "norm_topk_prob": False}


FAMILY = Family(
    DeepseekV2Config, deepseek_v3, tensors=decoder_tensors.decoder(latent_layer),
    hf=(HFConfig("deepseek_v2", "DeepseekV2ForCausalLM", COMMON | LATENT_KEYS | {
        key: ours for key, ours in EXPERT_KEYS.items() if key not in _OF_GROUPS},
        fixed=BIASES | {"scoring_func": ("softmax",), "moe_layer_freq": (1,)}, read=_read, write=_write),))
