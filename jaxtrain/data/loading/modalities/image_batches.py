"""Batches of rows of images, augmented; and, for flow matching, the times and the noise of each step."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from jaxtrain.config.schema import DataConfig
from jaxtrain.config.vision_keys import DualEncoderConfig, PatchesConfig
from jaxtrain.data.corpus.sequences import SequenceCorpus
from jaxtrain.data.loading.loader import Batches
from jaxtrain.data.loading.modalities.augmentation import augmented, numbers_for
from jaxtrain.data.packing.image_rows import CaptionedImages, ImageRows, LabelledImages, PairedImages
from jaxtrain.errors import UserError


class ImageBatches(Batches):
    """Batches by step whose images are augmented anew at every step."""

    def __init__(self, rows: ImageRows, *, global_batch_size: int, seed: int, augment: Collection[str] = (),
                 noise: bool = False, repeat: bool = True, threads: int = 0):
        """`noise`: rows also have `times` of their images, and a number for each patch that its noise is drawn from.
        """
        super().__init__(rows, global_batch_size=global_batch_size, seed=seed, repeat=repeat, threads=threads)
        self.images = rows
        self._seed, self._augment, self._noise = seed, augment, noise

    def _read(self, step: int, within: np.ndarray | Sequence[int]) -> dict[str, np.ndarray]:
        batch = super()._read(step, np.asarray(within))
        rows = [{name: x[i] for name, x in batch.items()} for i in range(len(within))]
        for i, number in enumerate(np.asarray(within).tolist()):
            if self._augment:
                rows[i] = augmented(rows[i], self._augment, self._seed, step, number, self.images.class_at)
            if self._noise:
                random = numbers_for(self._seed, step, number, 0)
                rows[i] |= {"times": random.random(len(rows[i]["weights"]), np.float32),
                            "draws": random.integers(0, 2**32, len(rows[i]["images"]), np.uint32)}
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]} if rows else batch

    def shape(self, step: int) -> tuple[int, int]:
        """Return the number of rows, and of patches per row, which is the same at every step."""
        return self.global_batch_size, len(self.all_rows[0]["images"])


def image_batches(c: PatchesConfig, d: DataConfig, corpus: SequenceCorpus, split: str) -> ImageBatches | None:
    """Return the batches of a split by step, with rows as the model reads them; None if it has no images.

    Those of "train" are endless. Those of "eval" have every image once, as it is.
    """
    _check(c, corpus)
    if not len(sequences := getattr(corpus, split)):
        if split == "train":
            raise UserError("data.source", "it has no image to train on", "prepare it with a smaller eval_fraction")
        return None
    shape, at = (sequences, d.seq_len, c.images_per_row), c.class_at
    if c.images_with == "captions":
        if "crop" in d.augment:
            raise UserError("data.augment", "a caption may describe what a crop removes, and patches are tokens here",
                            "leave out crop")
        rows: ImageRows = CaptionedImages(*shape, corpus.manifest["captions"]["end"], class_at=at)
    elif isinstance(c, DualEncoderConfig):
        rows = PairedImages(*shape, c.text_len, c.text_begin, c.text_end, c.text_pad, class_at=at)
    else:
        rows = LabelledImages(*shape)
    train = split == "train"
    return ImageBatches(rows, global_batch_size=d.global_batch_size, seed=d.seed if train else 0,
                        augment=d.augment if train else (), noise=c.images_with == "labels", repeat=train)


def _check(c: Any, corpus: SequenceCorpus) -> None:
    """Refuse a corpus that is not what the model reads."""
    said, labelled = corpus.manifest, c.images_with == "labels"
    if (patch := said.get("patch_size")) is None:
        raise UserError("data.source", f"{c.name} reads images, and it has {', '.join(corpus.train.columns)}",
                        "name one that jaxtrain prepare_sequences images wrote")
    if patch != c.patch_size:
        raise UserError("model.patch_size", f"it is {c.patch_size}, and data.source has patches of {patch} pixels",
                        f"set it to {patch}, or prepare the images with --patch_size={c.patch_size}")
    if (column := "label" if labelled else "target") not in corpus.train.columns:
        raise UserError("data.source", f"{c.name} reads a {'label' if labelled else 'caption'} of each image, and it "
                        f"has no column {column!r}", f"prepare it by --label={'folder' if labelled else 'text'}")
    if (most := said["options"]["patches_per_side"]) > c.patches_per_side:
        raise UserError("model.patches_per_side", f"{c.patches_per_side} is less than the {most} that data.source may "
                        "have", f"set it to {most}")
    key = "num_labels" if labelled else "vocab_size"
    if (most := len(said["labels"]) if labelled else said["captions"]["vocab_size"]) > getattr(c, key):
        raise UserError(f"model.{key}", f"{getattr(c, key)} is less than the {most} of data.source",
                        f"set it to {most}")


def summary(batches: Any, corpus: SequenceCorpus) -> tuple[str, str]:
    """Return for the log how much there is in each split, how full rows are, and how many captions lose their ends."""
    rows = batches.images
    cut = rows.cut if isinstance(rows, PairedImages) else 0
    lost = f"; {cut:,} of {len(corpus.train):,} captions are cut to {rows.room} tokens (model.text_len)" if cut else ""
    return (f"{len(corpus.train):,} training and {len(corpus.eval):,} evaluation images",
            f"they share {len(rows):,} rows of up to {rows.most} images, which are {rows.fill:.2%} full{lost}")
