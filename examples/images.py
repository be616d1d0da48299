"""Images and captions: an encoder by contrast (SigLIP), then a decoder that says what it sees with it, frozen.

    python examples/images.py

A few minutes on a laptop. The images are made here, PNG files of several sizes with a caption each in a text file.
Zero-shot accuracy is how often the nearest caption is an image's own; a caption counts as right if all of it is.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from PIL import Image

import jaxtrain as jt
from jaxtrain.data.prepare_sequences.image_patches import Images
from jaxtrain.data.prepare_sequences.prepare_sequences import prepare_sequences, summary
from jaxtrain.models.vision.connector import logits

COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 80, 230), "yellow": (230, 220, 50)}
KINDS, SIZES = ("square", "circle", "cross"), {"small": 0.22, "large": 0.42}
IMAGES, END = 1200, 256
MODEL = {"patch_size": 4, "patches_per_side": 8, "images_per_row": 8, "num_layers": 2, "embed_dim": 64,
         "num_heads": 4, "image_layers": 2, "image_embed_dim": 64, "image_heads": 4, "max_seq_len": 256}
TRAINED = {"optimizer": {"learning_rate": 3e-3, "warmup_steps": 20}, "checkpoint": {"every": 0.5}}


def draw(rng):
    """A shape somewhere on a noisy ground, in an image of any size, and what to say of it."""
    height, width = rng.integers(16, 29, 2)
    size, colour, kind = (str(rng.choice(list(names))) for names in (SIZES, COLOURS, KINDS))
    radius = SIZES[size] * min(height, width)
    y, x = np.indices((height, width)) - np.array(
        [rng.uniform(radius, n - radius) for n in (height, width)])[:, None, None]
    inside = {"square": np.maximum(abs(y), abs(x)) < radius, "circle": y**2 + x**2 < radius**2,
              "cross": (np.minimum(abs(y), abs(x)) < radius / 3) & (np.maximum(abs(y), abs(x)) < radius)}[kind]
    pixels = rng.integers(0, 90, (height, width, 3))
    pixels[inside] = np.array(COLOURS[colour]) + rng.integers(-15, 16, 3)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)), f"a {size} {colour} {kind}"


def make_corpus(folder):
    rng = np.random.default_rng(0)
    (folder / "files").mkdir()
    for i in range(IMAGES):
        image, caption = draw(rng)
        image.save(folder / "files" / f"{i:04}.png")
        (folder / "files" / f"{i:04}.txt").write_text(caption)
    corpus = prepare_sequences([str(folder / "files")], folder / "corpus", Images(
        "text", patch_size=4, most_patches=49, patches_per_side=8, eval_fraction=0.08))
    print(summary(corpus))
    return corpus


def last_line(workdir):
    return json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])


def contrast(folder):
    """Train both encoders; return the encoder of images."""
    config = jt.make_config({
        "model": {"name": "siglip", "text_len": 24, **MODEL},
        "data": {"source": str(folder / "corpus"), "packing": "best_fit", "seq_len": 256, "global_batch_size": 8,
                 "augment": ["flip"]},
        "train": {"steps": 400, "eval_every": 0.5}, **TRAINED})
    state = jt.train(config, folder / "siglip")
    print(f"zero-shot accuracy: {last_line(folder / 'siglip')['eval_accuracy']:.0%}")
    return jax.device_get(state.params["image"])


class Encoder(jt.Extension):
    """The parameters of a trained encoder, with which a run begins."""

    def __init__(self, params):
        self.params = params

    def initial_params(self, run):
        """Return the encoder's; the decoder's are random."""
        return {"image": self.params}


def caption(folder, encoder, corpus):
    """Train a decoder on what the frozen encoder sees; caption unseen images."""
    config = jt.make_config({
        "model": {"name": "vision_language", "mlp_dim": 192, **MODEL},
        "data": {"source": str(folder / "corpus"), "packing": "best_fit", "seq_len": 256, "global_batch_size": 4},
        "train": {"steps": 400, "eval_every": 0.5, "freeze": ["image/*"]}, **TRAINED})
    run = jt.build(config, extensions=[Encoder(encoder)])
    state = jt.train(run, folder / "captions")
    found = say(run.module(state), corpus.eval)
    wanted = [bytes(one["target"].astype(np.uint8)).decode() for one in corpus.eval]
    print(f"{found[0]!r} for {wanted[0]!r}")
    right = np.mean([a == b for a, b in zip(found, wanted, strict=True)])
    print(f"whole captions of {len(wanted)} unseen images that are right: {right:.0%}")


def say(model, images, room=80, longest=24):
    """The likeliest caption of each image, token by token."""
    count, graph, weights = len(images), *nnx.split(model)
    batch = {name: np.zeros((count, room), np.int32) for name in ("tokens", "segments", "images")}
    batch |= {"patches": np.zeros((count, room, 48), np.uint8), "places": np.zeros((count, room, 2), np.int32),
              "positions": np.broadcast_to(np.arange(room), (count, room))}
    ends = np.array([len(one["places"]) for one in images])
    for i, (one, end) in enumerate(zip(images, ends, strict=True)):
        batch["patches"][i, :end], batch["places"][i, :end], batch["images"][i, :end] = (
            one["patches"], one["places"], 1)
    batch["segments"] += 1
    likeliest = jax.jit(lambda weights, batch: jnp.argmax(logits(nnx.merge(graph, weights), batch), -1))
    rows, starts = np.arange(count), ends.copy()
    for _ in range(longest):
        batch["tokens"][rows, ends] = np.asarray(likeliest(weights, batch))[rows, ends - 1]
        ends = ends + 1
    texts = (batch["tokens"][i, start:start + longest].tolist() for i, start in enumerate(starts))
    return [bytes(ids[:ids.index(END)] if END in ids else [min(id, 255) for id in ids]).decode(errors="replace")
            for ids in texts]


def main(folder):
    corpus = make_corpus(folder)
    caption(folder, contrast(folder), corpus)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
