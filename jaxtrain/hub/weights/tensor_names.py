"""The published tensor of each parameter, by family: names as they are in safetensors files, and layouts.

One declaration serves both directions. A layout such as "(hk)d->dhk" says that the published matrix has heads times
head width as its rows, and that the parameter has the dimensions d, h and k; letters in parentheses are one dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtrain.config.families import DeepseekV3Config, GptOssConfig, ModelConfig, RoutedConfig
from jaxtrain.config.modality_families import WhisperConfig
from jaxtrain.config.vision_keys import CHANNELS, DualEncoderConfig, PictureConfig


@dataclass(frozen=True)
class Entry:
    """A parameter and the tensor that holds it, or the tensors of its layers and experts.

    Args:
        ours: the parameter's path.
        theirs: the tensor's name, with {layer} and {expert} for those that the parameter stacks.
        layout: from the tensor's dimensions to those of one layer's, or one expert's, parameter.
        part: which one of how many equal parts that the tensor holds along the dimension p of the layout.
        paired: how many of the last entries of the parameter's last dimension are rotary, whose pairs are neighbours in
            the tensor and halves apart in the parameter.
        layers: the published numbers of the layers that the parameter stacks; None: it is not of a layer.
        experts: how many experts it stacks; 0: it is not of an expert.
        float32: whether it is written in float32 whatever the others are, as published.
        cut: sizes into which the parameter's dimensions are cut where the tensor has others; None: it has the same.
    """

    ours: str
    theirs: str
    layout: str = "d->d"
    part: tuple[int, int] = (0, 1)
    paired: int = 0
    layers: Sequence[int] | None = None
    experts: int = 0
    float32: bool = False
    cut: tuple[int, ...] | None = None


REWARD_HEAD = "reward_head/kernel"

# Of a layer: paths below the layer, names below "model.layers.{layer}.".
_HEADS, _OUT = "(hk)d->dhk", "d(hk)->hkd"
_ATTENTION = [*(Entry(f"attention/{name}/kernel", f"self_attn.{name}_proj.weight", _HEADS) for name in "qkv"),
              Entry("attention/out/kernel", "self_attn.o_proj.weight", _OUT)]
_NORMS = [Entry("attention_norm/scale", "input_layernorm.weight"),
          Entry("mlp_norm/scale", "post_attention_layernorm.weight")]
_QK_NORMS = [Entry(f"attention/{name}_norm/scale", f"self_attn.{name}_norm.weight") for name in "qk"]
_BIASES = [Entry(f"attention/{name}/bias", f"self_attn.{name}_proj.bias", "(hk)->hk") for name in "qkv"]
_OUT_BIAS_AND_SINKS = [Entry("attention/out/bias", "self_attn.o_proj.bias"),
                       Entry("attention/sinks", "self_attn.sinks")]
# Every second column of one tensor is the gate's, the others are up's.
_GPT_OSS_EXPERTS = [
    Entry("mlp/router/kernel", "mlp.router.weight", "ed->de"), Entry("mlp/router/logit_bias", "mlp.router.bias"),
    *(entry for n, name in enumerate(("gate", "up")) for entry in (
        Entry(f"mlp/{name}", "mlp.experts.gate_up_proj", "ed(fp)->edf", (n, 2)),
        Entry(f"mlp/{name}_bias", "mlp.experts.gate_up_proj_bias", "e(fp)->ef", (n, 2)))),
    Entry("mlp/down", "mlp.experts.down_proj", "efd->efd"),
    Entry("mlp/down_bias", "mlp.experts.down_proj_bias", "ed->ed")]
_SANDWICH = [Entry("attention_norm/scale", "input_layernorm.weight"),
             Entry("attention_out_norm/scale", "post_attention_layernorm.weight"),
             Entry("mlp_norm/scale", "pre_feedforward_layernorm.weight"),
             Entry("mlp_out_norm/scale", "post_feedforward_layernorm.weight")]
_GPT2 = [
    *(Entry(f"attention/{name}/kernel", "attn.c_attn.weight", "d(phk)->dhk", (n, 3)) for n, name in enumerate("qkv")),
    *(Entry(f"attention/{name}/bias", "attn.c_attn.bias", "(phk)->hk", (n, 3)) for n, name in enumerate("qkv")),
    Entry("attention/out/kernel", "attn.c_proj.weight", "(hk)d->hkd"), Entry("attention/out/bias", "attn.c_proj.bias"),
    Entry("mlp/up/kernel", "mlp.c_fc.weight", "df->df"), Entry("mlp/up/bias", "mlp.c_fc.bias"),
    Entry("mlp/down/kernel", "mlp.c_proj.weight", "fd->fd"), Entry("mlp/down/bias", "mlp.c_proj.bias"),
    *(Entry(f"{ours}/{kind}", f"{theirs}.{name}") for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2"))
      for kind, name in (("scale", "weight"), ("bias", "bias")))]


def _latent(c: DeepseekV3Config) -> list[Entry]:
    """Return the entries of multi-head latent attention."""
    turn = c.rope_head_dim
    queries = [Entry("attention/q_down/kernel", "self_attn.q_a_proj.weight", "ld->dl"),
               Entry("attention/q_norm/scale", "self_attn.q_a_layernorm.weight"),
               Entry("attention/q/kernel", "self_attn.q_b_proj.weight", "(hk)l->lhk", paired=turn)]
    return [
        *(queries if c.q_rank else [Entry("attention/q/kernel", "self_attn.q_proj.weight", _HEADS, paired=turn)]),
        Entry("attention/kv_down/kernel", "self_attn.kv_a_proj_with_mqa.weight", "ld->dl", paired=turn),
        Entry("attention/kv_norm/scale", "self_attn.kv_a_layernorm.weight"),
        Entry("attention/kv/kernel", "self_attn.kv_b_proj.weight", "(hk)l->lhk"),
        Entry("attention/out/kernel", "self_attn.o_proj.weight", _OUT)]


def _mlp(ours: str = "mlp", theirs: str = "mlp") -> list[Entry]:
    return [Entry(f"{ours}/{name}/kernel", f"{theirs}.{name}_proj.weight", "fd->df" if name != "down" else "df->fd")
            for name in ("gate", "up", "down")]


def _experts(c: RoutedConfig) -> list[Entry]:
    """Return the entries of a layer's router and experts."""
    if isinstance(c, GptOssConfig):
        return _GPT_OSS_EXPERTS
    mixtral = c.name == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    found = [Entry("mlp/router/kernel", f"{block}.gate.weight", "ed->de")]
    if c.router_bias_rate:
        found += [Entry("mlp/router/bias", f"{block}.gate.e_score_correction_bias", float32=True)]
    for ours, name in zip(("gate", "up", "down"), names, strict=True):
        found += [Entry(f"mlp/{ours}", f"{block}.experts.{{expert}}.{name}.weight",
                        "df->fd" if ours == "down" else "fd->df", experts=c.num_experts)]
    return found + (_mlp("mlp/shared", "mlp.shared_experts") if c.shared_experts else [])


def _layer(c: ModelConfig, experts: bool) -> list[Entry]:
    """Return the entries of one layer, with or without experts."""
    if c.name == "gpt2":
        return _GPT2
    attention = _latent(c) if isinstance(c, DeepseekV3Config) else _ATTENTION
    more = {"qwen2": _BIASES, "qwen3": _QK_NORMS, "qwen3_moe": _QK_NORMS, "gemma3": _QK_NORMS,
            "gpt_oss": [*_BIASES, *_OUT_BIAS_AND_SINKS]}.get(c.name, [])
    mlp = _experts(c) if experts and isinstance(c, RoutedConfig) else _mlp()
    return [*attention, *more, *(_SANDWICH if c.name == "gemma3" else _NORMS), *mlp]


def _pair(ours: str, theirs: str, layout: str = "d->d", bias: str = "d->d", weight: str = "scale") -> list[Entry]:
    """Return the entries of a weight and a bias."""
    return [Entry(f"{ours}/{weight}", f"{theirs}.weight", layout), Entry(f"{ours}/bias", f"{theirs}.bias", bias)]


def _tower(ours: str, theirs: str, layers: int) -> list[Entry]:
    """Return the entries of the blocks of one of two encoders."""
    at = f"{theirs}.encoder.layers.{{layer}}"
    found = [entry for name in ("q", "k", "v") for entry in _pair(
        f"attention/{name}", f"{at}.self_attn.{name}_proj", _HEADS, "(hk)->hk", "kernel")]
    found += [*_pair("attention/out", f"{at}.self_attn.out_proj", _OUT, weight="kernel"),
              *_pair("attention_norm", f"{at}.layer_norm1"), *_pair("mlp_norm", f"{at}.layer_norm2"),
              *_gelu_mlp("mlp", f"{at}.mlp")]
    return [replace(entry, ours=f"{ours}/blocks/layer/{entry.ours}", layers=range(layers)) for entry in found]


def _gelu_mlp(ours: str, theirs: str) -> list[Entry]:
    return [*_pair(f"{ours}/up", f"{theirs}.fc1", "fd->df", weight="kernel"),
            *_pair(f"{ours}/down", f"{theirs}.fc2", "df->fd", weight="kernel")]


def picture_encoder(c: PictureConfig) -> list[Entry]:
    """Return the entries of SigLIP's or CLIP's encoder of pictures."""
    at, patch = "vision_model.embeddings", (c.patch_size, c.patch_size, CHANNELS, c.picture_embed_dim)
    first = [Entry("picture/token", f"{at}.class_embedding"), *_pair("picture/first_norm", "vision_model.pre_layrnorm")]
    return [
        Entry("picture/embed/kernel", f"{at}.patch_embedding.weight", "dcij->ijcd", cut=patch),
        Entry("picture/grid/table", f"{at}.position_embedding.weight", "td->td"),
        *(first if c.class_token else [Entry("picture/embed/bias", f"{at}.patch_embedding.bias")]),
        *_tower("picture/encoder", "vision_model", c.picture_layers),
        *_pair("picture/encoder/norm", "vision_model.post_layernorm")]


def _dual_encoder(c: DualEncoderConfig) -> list[Entry]:
    """Return the entries of two encoders."""
    head, text, wide = "vision_model.head", "text_model", c.picture_embed_dim
    pool = [
        Entry("pool/query", f"{head}.probe", "abd->abd", cut=(1, 1, wide)),
        *(entry for n, name in enumerate("qkv") for entry in (
            Entry(f"pool/{name}/kernel", f"{head}.attention.in_proj_weight", "(phk)d->dhk", (n, 3)),
            Entry(f"pool/{name}/bias", f"{head}.attention.in_proj_bias", "(phk)->hk", (n, 3)))),
        *_pair("pool/out", f"{head}.attention.out_proj", _OUT, weight="kernel"),
        *_pair("pool/norm", f"{head}.layernorm"), *_gelu_mlp("pool/mlp", f"{head}.mlp")]
    own = [*pool, *_pair("text_head", f"{text}.head", "ed->de", weight="kernel"), Entry("scale", "logit_scale"),
           Entry("bias", "logit_bias")] if c.name == "siglip" else [
        Entry("scale", "logit_scale", "->", cut=()), Entry("text_head/kernel", "text_projection.weight", "ed->de"),
        Entry("picture_head/kernel", "visual_projection.weight", "ed->de")]
    return [
        *own, *picture_encoder(c), Entry("embed/table", f"{text}.embeddings.token_embedding.weight", "vd->vd"),
        Entry("positions/table", f"{text}.embeddings.position_embedding.weight", "td->td"),
        *_tower("text", text, c.num_layers), *_pair("text/norm", f"{text}.final_layer_norm")]


def _whisper(c: WhisperConfig) -> list[Entry]:
    """Return the entries of an encoder and a decoder."""
    def pair(ours: str, theirs: str, *args: str, **keys: str) -> list[Entry]:
        return _pair(ours, f"model.{theirs}", *args, **keys)

    def attention(ours: str, theirs: str) -> list[Entry]:
        found = [entry for name in "qkv" for entry in pair(f"{ours}/{name}", f"{theirs}.{name}_proj", _HEADS,
                                                           "(hk)->hk", "kernel") if entry.ours != f"{ours}/k/bias"]
        return found + pair(f"{ours}/out", f"{theirs}.out_proj", _OUT, weight="kernel")

    def layer(side: str) -> list[Entry]:
        at = f"{side}.layers.{{layer}}"
        found = [*attention("attention", f"{at}.self_attn"), *pair("attention_norm", f"{at}.self_attn_layer_norm"),
                 *pair("mlp/up", f"{at}.fc1", "fd->df", weight="kernel"),
                 *pair("mlp/down", f"{at}.fc2", "df->fd", weight="kernel"), *pair("mlp_norm", f"{at}.final_layer_norm")]
        if side == "decoder":
            found += [*attention("memory", f"{at}.encoder_attn"), *pair("memory_norm", f"{at}.encoder_attn_layer_norm")]
        return found

    stacks = (("encoder_blocks", "encoder", c.encoder_layers), ("blocks", "decoder", c.num_layers))
    return [
        Entry("embed/table", "model.decoder.embed_tokens.weight", "vd->vd"), *pair("norm", "decoder.layer_norm"),
        Entry("positions/table", "model.decoder.embed_positions.weight", "td->td"),
        Entry("audio_positions", "model.encoder.embed_positions.weight", "td->td"),
        *pair("first/linear", "encoder.conv1", "dcw->wcd", weight="kernel"),
        *pair("second/linear", "encoder.conv2", "dcw->wcd", weight="kernel"),
        *pair("encoder_norm", "encoder.layer_norm"),
        *([Entry("ctc/kernel", "ctc_head.weight", "vd->dv")] if c.ctc_weight else []),
        *(replace(entry, ours=f"{stack}/layer/{entry.ours}", layers=range(layers))
          for stack, side, layers in stacks for entry in layer(side))]


def entries(c: ModelConfig, reward_head: bool = False) -> list[Entry]:
    """Return the entry of every parameter of a model; `reward_head`: it has one in place of the output projection."""
    if isinstance(c, WhisperConfig):
        return _whisper(c)
    if isinstance(c, DualEncoderConfig):
        return _dual_encoder(c)
    gpt2 = c.name == "gpt2"
    names = ("transformer.wte.weight", "transformer.ln_f.weight", "transformer.h") if gpt2 else (
        "model.embed_tokens.weight", "model.norm.weight", "model.layers")
    found = [Entry("embed/table", names[0], "vd->vd"), Entry("norm/scale", names[1])]
    if gpt2:
        found += [Entry("norm/bias", "transformer.ln_f.bias"),
                  Entry("positions/table", "transformer.wpe.weight", "td->td")]
    if reward_head:
        found += [Entry(REWARD_HEAD, "score.weight", "vd->dv")]
    elif not c.tied_embeddings:
        found += [Entry("output/kernel", "lm_head.weight", "vd->dv")]
    for stack, numbers, experts in _stacks(c):
        found += [replace(entry, ours=f"{stack}/{entry.ours}", theirs=f"{names[2]}.{{layer}}.{entry.theirs}",
                          layers=numbers) for entry in _layer(c, experts)]
    return found


def _stacks(c: ModelConfig) -> list[tuple[str, range, bool]]:
    """Return the path of each stack of layers, the published numbers of its layers, and whether they have experts."""
    every, dense = c.experts_every, c.dense_layers
    first = [("first_blocks/layer", range(dense), False)] if dense else []
    if every == 1:
        return [*first, ("blocks/layer", range(dense, c.num_layers), c.num_experts > 0)]
    return [*first, *((f"blocks/layer/layer_{n}", range(dense + n, c.num_layers, every), n == every - 1)
                      for n in range(every))]
