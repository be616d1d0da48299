"""Whisper (arXiv 2212.04356): an encoder of log-mel frames, and a decoder of tokens with cross-attention."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.config.modality_families import WhisperConfig
from jaxtrain.config.speech import published_speech
from jaxtrain.hf.decoder_tensors import HEADS, OUT, pair
from jaxtrain.hf.hf_format import NO, Entry, HFConfig, HFTensors, Keys, Refuse, renaming
from jaxtrain.models.row_flops import INPUT, Need, attended

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute
    from jaxtrain.models.modalities.speech_transformer import Whisper

MEMORY = ("blocks/layer/memory/k/", "blocks/layer/memory/v/")  # of the decoder, which meet the encoder's output


def whisper(c: WhisperConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Whisper":
    """Build a Whisper model."""
    from jaxtrain.models.modalities.speech_transformer import Whisper

    return Whisper(c, compute, rngs=rngs)


def useful_flops(c: WhisperConfig, frames: int) -> Need:
    """Frames meet the first convolution, every second one the encoder, and tokens the decoder and its head."""
    heard, tokens, width = -(-frames // 2), c.max_seq_len, c.num_heads * c.head_dim

    def met(path: str) -> float:
        if path.startswith("first/"):
            return INPUT * frames
        of_tokens = path.startswith(("blocks/", "embed/")) and not path.startswith(MEMORY)
        return tokens if of_tokens else heard

    pairs = sum(_heard_together(c, at, heard) for at in range(heard))
    return met, (attended(c.encoder_layers, width, pairs)
                 + attended(c.num_layers, width, tokens**2 / 2 + tokens * heard))


def _heard_together(c: WhisperConfig, at: int, heard: int) -> int:
    """Return how many positions of the encoder the one `at` a place attends to."""
    if not c.audio_chunk:
        return heard
    chunk = at // c.audio_chunk
    first = max(0, chunk - c.audio_chunks_back) if c.audio_chunks_back else 0
    return min(heard, (chunk + 1) * c.audio_chunk) - first * c.audio_chunk


def _entries(c: WhisperConfig, reward_head: bool) -> list[Entry]:
    """Return the entries of an encoder and a decoder."""
    def both(ours: str, theirs: str, *args: str, **keys: str) -> list[Entry]:
        return pair(ours, f"model.{theirs}", *args, **keys)

    def attention(ours: str, theirs: str) -> list[Entry]:
        found = [entry for name in "qkv" for entry in both(f"{ours}/{name}", f"{theirs}.{name}_proj", HEADS,
                                                           "(hk)->hk", "kernel") if entry.ours != f"{ours}/k/bias"]
        return found + both(f"{ours}/out", f"{theirs}.out_proj", OUT, weight="kernel")

    def layer(side: str) -> list[Entry]:
        at = f"{side}.layers.{{layer}}"
        found = [*attention("attention", f"{at}.self_attn"), *both("attention_norm", f"{at}.self_attn_layer_norm"),
                 *both("mlp/up", f"{at}.fc1", "fd->df", weight="kernel"),
                 *both("mlp/down", f"{at}.fc2", "df->fd", weight="kernel"), *both("mlp_norm", f"{at}.final_layer_norm")]
        if side == "decoder":
            found += [*attention("memory", f"{at}.encoder_attn"), *both("memory_norm", f"{at}.encoder_attn_layer_norm")]
        return found

    stacks = (("encoder_blocks", "encoder", c.encoder_layers), ("blocks", "decoder", c.num_layers))
    return [
        Entry("embed/table", "model.decoder.embed_tokens.weight", "vd->vd"), *both("norm", "decoder.layer_norm"),
        Entry("positions/table", "model.decoder.embed_positions.weight", "td->td"),
        Entry("audio_positions", "model.encoder.embed_positions.weight", "td->td"),
        *both("first/linear", "encoder.conv1", "dcw->wcd", weight="kernel"),
        *both("second/linear", "encoder.conv2", "dcw->wcd", weight="kernel"),
        *both("encoder_norm", "encoder.layer_norm"),
        *([Entry("ctc/kernel", "ctc_head.weight", "vd->dv")] if c.ctc_weight else []),
        *(replace(entry, ours=f"{stack}/layer/{entry.ours}", layers=range(layers))
          for stack, side, layers in stacks for entry in layer(side))]


# Keys of ours that other programs ignore, where they differ from what is published.
_MORE = {"ctc_weight": 0.0, "mask_padding": False}


def _read(known: Keys, refuse: Refuse) -> Keys:
    for key in ("attention_heads", "ffn_dim"):
        if known[f"encoder_{key}"] != known[f"decoder_{key}"]:
            raise refuse(f"encoder_{key}", f"cannot be expressed: only decoder_{key}={known[f'decoder_{key}']} can")
    return {key: known.get(key, plain) for key, plain in _MORE.items()} | {
        "prefix": [known["decoder_start_token_id"]]}


def _write(c: WhisperConfig) -> Keys:
    return {"encoder_attention_heads": c.num_heads, "encoder_ffn_dim": c.mlp_dim, "is_encoder_decoder": True,
            "num_hidden_layers": c.encoder_layers, "tie_word_embeddings": True, "pad_token_id": None,
            "bos_token_id": None, "decoder_start_token_id": c.prefix[0]} | {
                key: value for key, plain in _MORE.items() if (value := getattr(c, key)) != plain}


def _beside(given: Keys, folder: Path, section: Keys) -> Keys:
    return published_speech.section(given, folder)


FAMILY = Family(
    WhisperConfig, whisper, objective="jaxtrain.objectives.transcription:Transcription", useful_flops=useful_flops,
    tensors=HFTensors(_entries, own_name=renaming({r"^proj_out\.weight$": "lm_head.weight"})),
    hf=(HFConfig(
        "whisper", "WhisperForConditionalGeneration",
        keys={"vocab_size": "vocab_size", "decoder_layers": "num_layers", "encoder_layers": "encoder_layers",
              "d_model": "embed_dim", "decoder_attention_heads": "num_heads", "decoder_ffn_dim": "mlp_dim",
              "max_target_positions": "max_seq_len", "max_source_positions": "audio_positions", "num_mel_bins": "mels",
              "eos_token_id": "end"},
        fixed={"activation_function": ("gelu",), "scale_embedding": NO, "tie_word_embeddings": (True,)},
        read=_read, write=_write, beside=_beside,
        unpublished=("prefix", "mask_padding", "ctc_weight", "time_masks", "time_mask", "mel_masks", "mel_mask")),))
