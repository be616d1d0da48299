"""Corpora of small images that are made here: of plain colours, with captions or in folders that say which."""

import numpy as np
from PIL import Image

from jaxtrain.data.prepare_sequences.image_patches import Images
from jaxtrain.data.prepare_sequences.prepare_sequences import prepare_sequences

COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}


def folder_of(root, target, count=60):
    """A corpus in patches of 2 x 2 pixels, of up to 6 a side; one in ten for evaluation."""
    rng = np.random.default_rng(0)
    for i in range(count):
        name = list(COLOURS)[i % 3]
        height, width = rng.integers(4, 10, 2)
        pixels = np.clip(np.array(COLOURS[name]) + rng.integers(-30, 31, (height, width, 3)), 0, 255)
        path = root / "files" / name / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
        path.with_suffix(".txt").write_text(f"a {name} one")
    source = Images(target, patch_size=2, most_patches=24, patches_per_side=6, eval_fraction=0.15)
    return prepare_sequences([str(root / "files")], root / "corpus", source).path
