"""The FLOPs that a row needs, forward and backward: its share of MFU, whatever rematerialization repeats.

Of models that are not decoders of text a row is taken to be full, since only the data say how full it is: a row of
patches holds `model.pictures_per_row` pictures of one size, each with a text of `model.text_len` tokens; audio and
transcripts are as long as the config allows. That is not known of pictures among text.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxtrain.config.modality_families import WhisperConfig
from jaxtrain.config.schema import Config
from jaxtrain.config.vision_keys import DualEncoderConfig, PictureFlowConfig
from jaxtrain.observe.flops import flops_per_token
from jaxtrain.run import Run
from jaxtrain.train_step.quantized_kernels import as_floats
from jaxtrain.train_step.report import matmul_parameters

INPUT = FROZEN = 2 / 3  # of a matrix's FLOPs: what it reads, or the matrix itself, has no gradient
# From (model, steps of a row) to how many vectors of a row meet the matrix at a path, and the FLOPs of attention.
Need = tuple[Callable[[str], float], float]


def of_row(run: Run) -> float:
    """Return the FLOPs of a row of the run's data; 0: not known."""
    config: Config = run.config
    model, steps = config.model, config.data.seq_len
    if known := FAMILIES.get(model.name):
        met, attention = known(model, steps)
        return attention + 6 * sum(size * met(path) for path, size in _matrices(run))
    matmuls = matmul_parameters(run.abstract, run.layout, model, run.objective.frozen_axes)
    return model.flops_known * flops_per_token(model, matmuls, steps, True) * steps


def attended(layers: int, width: int, pairs: float) -> float:
    """Return the FLOPs of layers whose queries attend to this many keys in all: of scores and values."""
    return 6 * layers * 2 * width * pairs


def dual_encoder(c: DualEncoderConfig, patches: int) -> Need:
    """Pictures meet their encoder, and as vectors the rest; a batch's similarities, less than 0.1 %, do not count."""
    pictures = c.pictures_per_row
    tokens = pictures * c.text_len
    seen = c.text_len / 2 if c.name == "clip" else c.text_len  # by a token, on average

    def met(path: str) -> float:
        room = path.split("/")[0]
        if path == "picture/embed/kernel":
            return INPUT * patches
        if path == "pool/q/kernel":
            return 0  # of one vector a batch
        return patches if room == "picture" or path.startswith(("pool/k/", "pool/v/")) else (
            tokens if room == "text" else pictures)

    pooled = attended(1, c.picture_embed_dim, patches) if c.pooling in ("attention", "probe") else 0
    return met, (attended(c.picture_layers, c.picture_embed_dim, patches**2 / pictures) + pooled
                 + attended(c.num_layers, c.embed_dim, tokens * seen))


def picture_flow(c: PictureFlowConfig, patches: int) -> Need:
    """Patches meet all but what a picture's time goes through."""
    def met(path: str) -> float:
        room = path.split("/")[0]
        times = c.pictures_per_row if room in ("up", "down") else patches
        return INPUT * times if path in ("picture/embed/kernel", "up/kernel") else times

    return met, attended(c.num_layers, c.embed_dim, patches**2 / c.pictures_per_row)


def whisper(c: WhisperConfig, frames: int) -> Need:
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


MEMORY = ("blocks/layer/memory/k/", "blocks/layer/memory/v/")
FAMILIES: dict[str, Callable[[Any, int], Need]] = {
    "siglip": dual_encoder, "clip": dual_encoder, "picture_flow": picture_flow, "whisper": whisper}


def _heard_together(c: WhisperConfig, at: int, heard: int) -> int:
    """Return how many positions of the encoder the one `at` a place attends to."""
    if not c.audio_chunk:
        return heard
    chunk = at // c.audio_chunk
    first = max(0, chunk - c.audio_chunks_back) if c.audio_chunks_back else 0
    return min(heard, (chunk + 1) * c.audio_chunk) - first * c.audio_chunk


def _matrices(run: Run) -> Iterator[tuple[str, float]]:
    """Yield the path and the size of each matrix: less for one that is not trained, none for tables and teachers."""
    own = {key: tree for key, tree in run.abstract.frozen.items() if key not in run.objective.frozen_axes}
    for tree, share in ((run.abstract.params, 1.0), (own, FROZEN)):
        for keys, leaf in jax.tree_util.tree_flatten_with_path(as_floats(tree))[0]:
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
            is_head = path == "embed/table" and run.config.model.tied_embeddings
            if leaf.ndim > 1 and (is_head or path.endswith(("/kernel", "/adapter/down", "/adapter/up"))):
                yield path, share * math.prod(leaf.shape)
