"""Augmented images: flipped, cropped and coloured at random, as a pure function of the seed, the step and the row.

Crops keep whole patches: those outside become padding, and the others have new places. So a row keeps its length.
"""

from collections.abc import Collection

import numpy as np

from jaxtrain.data.prepare_sequences.image_patches import from_patches, to_patches

KINDS = ("flip", "crop", "colour")
LEAST = 0.5  # the least share of an image's height, and of its width, that a crop keeps
STRENGTH = 0.3  # by how much brightness, contrast and each channel change at most


def augmented(row: dict[str, np.ndarray], kinds: Collection[str], seed: int, step: int, number: int,
              class_at: int | None = None) -> dict[str, np.ndarray]:
    """Return a row whose images are changed in these ways.

    Args:
        row: patches, their images and places.
        kinds: of `KINDS`.
        seed: of the data.
        step: of the batch.
        number: of the row in the batch of the step.
        class_at: the row of places that are a class token's; None: there are none.
    """
    row = row | {name: row[name].copy() for name in ("patches", "images", "places")}
    for image in range(1, int(row["images"].max(initial=0)) + 1):
        here = np.flatnonzero((row["images"] == image) & (row["places"][:, 0] != class_at))
        _augment(row, here, kinds, numbers_for(seed, step, number, image).random(9))
    return row


def numbers_for(seed: int, step: int, row: int, image: int) -> np.random.Generator:
    """Return the random numbers of an image of a row, or of the whole row as image 0."""
    # The first word of the counter counts the numbers drawn: were it the row's, rows would share what they draw.
    return np.random.Generator(np.random.Philox(key=[seed, step], counter=[0, row, image, 0]))


def _augment(row: dict[str, np.ndarray], here: np.ndarray, kinds: Collection[str], chances: np.ndarray) -> None:
    rows, columns = (row["places"][here].max(0) + 1).tolist()
    pixels = from_patches(row["patches"][here], rows, columns)
    if "colour" in kinds:
        pixels = _coloured(pixels, 1 + STRENGTH * (2 * chances[3:8] - 1))
    if "flip" in kinds and chances[0] < 0.5:
        pixels = pixels[:, ::-1]
    row["patches"][here] = to_patches(pixels, pixels.shape[0] // rows)[0]
    if "crop" in kinds:
        kept = [max(1, round(n * (LEAST + (1 - LEAST) * chances[1]))) for n in (rows, columns)]
        first = [int((n - keep + 1) * chance * 0.999999)
                 for n, keep, chance in zip((rows, columns), kept, chances[[2, 8]], strict=True)]
        places = row["places"][here] - first
        inside = np.asarray(((places >= 0) & (places < kept)).all(1))
        row["places"][here] = np.where(np.expand_dims(inside, 1), places, 0)
        outside = here[np.logical_not(inside)]
        row["images"][outside] = row["patches"][outside] = 0


def _coloured(pixels: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return the image with another brightness (of each channel) and contrast, rounded to 8 bits."""
    wide = pixels.astype(np.float32)
    mean = wide.mean()
    changed = ((wide - mean) * np.float32(factors[0]) + mean) * (factors[1] * factors[2:5]).astype(np.float32)
    return np.clip(np.rint(changed), 0, 255).astype(np.uint8)
