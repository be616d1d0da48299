"""A tiny SigLIP and a tiny CLIP, images and texts for them: for the truth and for the tests."""

import numpy as np

_TEXT = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 6}
_IMAGE = {"hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 3, "num_attention_heads": 6,
          "image_size": 8, "patch_size": 2}
CONFIGS = {
    "siglip": {"text_config": _TEXT | {"projection_size": 24, "pad_token_id": 1}, "vision_config": _IMAGE},
    "clip": {"text_config": _TEXT | {"projection_dim": 12, "bos_token_id": 22, "eos_token_id": 23},
             "vision_config": _IMAGE | {"projection_dim": 12}, "projection_dim": 12},
    # As in files that were written with other sizes and activations: an image has pixels beyond the last whole patch.
    "clip_exact": {"text_config": _TEXT | {"projection_dim": 12, "bos_token_id": 0, "eos_token_id": 2,
                                           "hidden_act": "gelu"},
                   "vision_config": _IMAGE | {"projection_dim": 12, "hidden_act": "gelu", "image_size": 9},
                   "projection_dim": 12},
}
SQUARE, OTHERS = [(4, 4)] * 4, [(3, 5), (6, 4), (2, 2), (1, 3)]  # rows and columns of patches of images
_RANDOM = np.random.default_rng(11)
IMAGES = {shape: [_RANDOM.integers(0, 256, (2 * rows, 2 * columns, 3)).astype(np.uint8) for rows, columns in shapes]
          for shape, shapes in (("square", SQUARE), ("others", OTHERS))}
TEXTS = [[5, 7], [9], [3, 4, 8], [21, 6, 2, 11, 13, 17, 19]]  # the last one is too long


def tokens(kind: str, ids: list[int]) -> list[int]:
    """A text as the published tokenizer gives it to the model, with padding behind it."""
    if kind == "siglip":
        return (ids[:5] + [1] * 6)[:6]
    return ([22] + ids[:4] + [23] * 5)[:6]


def mean_and_std(kind: str) -> tuple[list[float], list[float]]:
    """Return the numbers subtracted from pixels between 0 and 1, and those that they are divided by."""
    return ([0.5] * 3, [0.5] * 3) if kind == "siglip" else (
        [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
