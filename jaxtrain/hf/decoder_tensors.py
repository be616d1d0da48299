"""The tensors that published decoders share: lists of entries of a layer, and of a whole decoder.

Paths are below the layer, names below "model.layers.{layer}.".
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxtrain.config.hybrids.layer_pattern import ATTENTION as ATTENTION_LAYER
from jaxtrain.config.hybrids.layer_pattern import PatternConfig
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.hf.hf_format import Entry, HFTensors

REWARD_HEAD = "reward_head/kernel"
# The embeddings, the last norm, and what has the layers.
MODEL = "model.embed_tokens.weight", "model.norm.weight", "model.layers"
BACKBONE = "backbone.embeddings.weight", "backbone.norm_f.weight", "backbone.layers"
HEADS, OUT = "(hk)d->dhk", "d(hk)->hkd"
ATTENTION = [*(Entry(f"attention/{name}/kernel", f"self_attn.{name}_proj.weight", HEADS) for name in "qkv"),
             Entry("attention/out/kernel", "self_attn.o_proj.weight", OUT)]
QKV_BIASES = [Entry(f"attention/{name}/bias", f"self_attn.{name}_proj.bias", "(hk)->hk") for name in "qkv"]
QK_NORMS = [Entry(f"attention/{name}_norm/scale", f"self_attn.{name}_norm.weight") for name in "qk"]
NORMS = [Entry("attention_norm/scale", "input_layernorm.weight"),
         Entry("mlp_norm/scale", "post_attention_layernorm.weight")]
# Norms of all heads together.
ALL_HEADS_QK_NORMS = [replace(entry, layout="(hk)->hk") for entry in QK_NORMS]
# Norms after attention and the MLP only.
POST_NORMS = [Entry("attention_norm/scale", "post_attention_layernorm.weight"),
              Entry("mlp_norm/scale", "post_feedforward_layernorm.weight")]
# Norms before and after attention and the MLP.
SANDWICH_NORMS = [Entry("attention_norm/scale", "input_layernorm.weight"),
                  Entry("attention_out_norm/scale", "post_attention_layernorm.weight"),
                  Entry("mlp_norm/scale", "pre_feedforward_layernorm.weight"),
                  Entry("mlp_out_norm/scale", "post_feedforward_layernorm.weight")]


def swiglu(ours: str = "mlp", theirs: str = "mlp") -> list[Entry]:
    """Return the entries of a gated MLP."""
    return [Entry(f"{ours}/{name}/kernel", f"{theirs}.{name}_proj.weight", "fd->df" if name != "down" else "df->fd")
            for name in ("gate", "up", "down")]


def fused_qkv(c: Any, name: str = "self_attn.qkv_proj.weight") -> list[Entry]:
    """Return the entries of queries, keys and values that one tensor holds, and that of what attention returns."""
    sizes = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
    return [*(Entry(f"attention/{each}/kernel", name, HEADS, rows=(sum(sizes[:n]), sum(sizes)))
              for n, each in enumerate("qkv")), Entry("attention/out/kernel", "self_attn.o_proj.weight", OUT)]


def fused_swiglu() -> list[Entry]:
    """Return the entries of a gated MLP of which one tensor holds the gate and the matrix beside it."""
    return [*(Entry(f"mlp/{each}/kernel", "mlp.gate_up_proj.weight", "(pf)d->df", part=(n, 2))
              for n, each in enumerate(("gate", "up"))),
            Entry("mlp/down/kernel", "mlp.down_proj.weight", "df->fd")]


def ungated(bias: bool, ours: str = "mlp", theirs: str = "mlp") -> list[Entry]:
    """Return the entries of an MLP of two matrices."""
    return [Entry(f"{ours}/up/kernel", f"{theirs}.up_proj.weight", "fd->df"),
            Entry(f"{ours}/down/kernel", f"{theirs}.down_proj.weight", "df->fd"),
            *[Entry(f"{ours}/{name}/bias", f"{theirs}.{name}_proj.bias") for name in ("up", "down")] * bias]


def neighbouring_pairs(entries: list[Entry], width: int) -> list[Entry]:
    """Return the entries, with those of queries and keys whose first `width` numbers of a head turn with neighbours."""
    return [replace(entry, paired=width, paired_first=True)
            if entry.ours.startswith(("attention/q/", "attention/k/", "attention/q_norm/", "attention/k_norm/")) else
            entry for entry in entries]


def biases(qkv: bool = False, out: bool = False, mlp: bool = False) -> list[Entry]:
    """Return the entries of the biases that attention and a gated MLP have."""
    return [*QKV_BIASES * qkv, *[Entry("attention/out/bias", "self_attn.o_proj.bias")] * out,
            *[Entry(f"mlp/{name}/bias", f"mlp.{name}_proj.bias") for name in ("gate", "up", "down")] * mlp]


def experts(c: Any, block: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), *,
            router: str = "gate.weight", bias: str = "gate.e_score_correction_bias",
            shared: str = "shared_experts") -> list[Entry]:
    """Return the entries of a layer's router and experts, of which each has its own tensors."""
    found = [Entry("mlp/router/kernel", f"{block}.{router}", "ed->de")]
    if c.experts.bias_rate:
        found += [Entry("mlp/router/bias", f"{block}.{bias}", float32=True)]
    for ours, name in zip(("gate", "up", "down"), names, strict=True):
        found += [Entry(f"mlp/{ours}", f"{block}.experts.{{expert}}.{name}.weight",
                        "df->fd" if ours == "down" else "fd->df", experts=c.experts.num)]
    return found + (swiglu("mlp/shared", f"{block}.{shared}") if c.experts.shared_width else [])


def joined_experts(both: str, down: str, layouts: tuple[str, str] = ("e(pf)d->edf", "edf->efd")) -> list[Entry]:
    """Return the entries of experts of which two tensors hold all: gates and the matrices beside, and those back."""
    return [*(Entry(f"mlp/{name}", both, layouts[0], (n, 2)) for n, name in enumerate(("gate", "up"))),
            Entry("mlp/down", down, layouts[1])]


def latent_attention(c: Any, paired: int = 0, at: str = "self_attn", out: str = "o_proj") -> list[Entry]:
    """Return the entries of latent attention, of tensors below `at`, that of what it returns by the name `out`.

    `paired`: the rotary width, where pairs are neighbours in the tensors.
    """
    queries = [Entry("attention/q_down/kernel", f"{at}.q_a_proj.weight", "ld->dl"),
               Entry("attention/q_norm/scale", f"{at}.q_a_layernorm.weight"),
               Entry("attention/q/kernel", f"{at}.q_b_proj.weight", "(hk)l->lhk", paired=paired)]
    return [*(queries if c.q_rank else [Entry("attention/q/kernel", f"{at}.q_proj.weight", HEADS, paired=paired)]),
            Entry("attention/kv_down/kernel", f"{at}.kv_a_proj_with_mqa.weight", "ld->dl", paired=paired),
            Entry("attention/kv_norm/scale", f"{at}.kv_a_layernorm.weight"),
            Entry("attention/kv/kernel", f"{at}.kv_b_proj.weight", "(hk)l->lhk"),
            Entry("attention/out/kernel", f"{at}.{out}.weight", OUT)]


def decoder(layer: Callable[..., list[Entry]], whole: tuple[str, str, str] = MODEL,
            norm: Sequence[Entry] | None = None, *,
            ahead: Callable[[ModelConfig, list[Entry]], list[Entry]] | None = None, further_layers: bool = False,
            **options: Any) -> HFTensors:
    """Return the tensors of a decoder of which `layer(config, whether it has experts)` returns those of one layer.

    Where layers are of several kinds, the letter of the layer's kind is a third argument.

    Args:
        layer: returns the entries of a layer.
        whole: the names of the embeddings, of the last norm, and of what has the layers.
        norm: the entries of the last norm, where it has others than a scale.
        ahead: returns the entries of multi-token prediction, of a config and those of a block, where it is published.
        further_layers: as in `HFTensors`, of a family whose files have them in a form that is not known.
        options: of `HFTensors`.
    """
    embed, scale, layers = whole

    def entries(c: Any, reward_head: bool) -> list[Entry]:
        last = [Entry("norm/scale", scale)] if norm is None else norm
        found = [Entry("embed/table", embed, "vd->vd"), *last, *head(c, reward_head)]
        for stack, numbers, routed in stacks(c):
            kind = (c.layer_kinds[numbers[0]],) if isinstance(c, PatternConfig) else ()
            found += in_stack(stack, numbers, layers, layer(c, routed, *kind))
        if ahead is not None and c.multi_token_loss and not reward_head:
            kind = (ATTENTION_LAYER,) if isinstance(c, PatternConfig) else ()
            found += ahead(c, layer(c, c.experts.num > 0, *kind))
        return found

    return HFTensors(entries, further_layers=further_layers or ahead is not None, **options)


def head(c: Any, reward_head: bool) -> list[Entry]:
    """Return the entry of the output projection, or of the reward head in its place; none if embeddings are tied."""
    if reward_head:
        return [Entry(REWARD_HEAD, "score.weight", "vd->dv")]
    return [] if c.ties_head else [Entry("output/kernel", "lm_head.weight", "vd->dv"),
                                   *[Entry("output/bias", "lm_head.bias")] * c.head_bias]


def in_stack(stack: str, numbers: range, at: str, layer: list[Entry]) -> list[Entry]:
    """Return the entries of a layer as those of a stack of layers with these published numbers."""
    return [replace(entry, ours=f"{stack}/{entry.ours}", theirs=f"{at}.{{layer}}.{entry.theirs}", layers=numbers)
            for entry in layer]


def stacks(c: Any) -> list[tuple[str, range, bool]]:
    """Return the path of each stack of layers, the published numbers of its layers, and whether they have experts."""
    every, dense, period = c.experts.every, c.experts.dense_layers, c.period
    first = [("first_blocks/layer", range(dense), False)] if dense else []
    if period == 1:
        return [*first, ("blocks/layer", range(dense, c.num_layers), c.experts.num > 0)]
    return [*first, *((f"blocks/layer/layer_{n}", range(dense + n, c.num_layers, period),
                       c.experts.num > 0 and (n + 1) % every == 0) for n in range(period))]


def convolution(ours: str, theirs: str, rows: tuple[int, int] | None = None) -> Entry:
    """Return the entry of a convolution over time of each channel of heads."""
    return Entry(f"{ours}/kernel", f"{theirs}.weight", "(hk)pw->whk", rows=rows)


def pair(ours: str, theirs: str, layout: str = "d->d", bias: str = "d->d", weight: str = "scale") -> list[Entry]:
    """Return the entries of a weight and a bias."""
    return [Entry(f"{ours}/{weight}", f"{theirs}.weight", layout), Entry(f"{ours}/bias", f"{theirs}.bias", bias)]


def gelu_mlp(ours: str, theirs: str) -> list[Entry]:
    """Return the entries of an MLP of two layers with biases."""
    return [*pair(f"{ours}/up", f"{theirs}.fc1", "fd->df", weight="kernel"),
            *pair(f"{ours}/down", f"{theirs}.fc2", "df->fd", weight="kernel")]
