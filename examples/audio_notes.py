"""Transcribe melodies: clips of audio to bucketed batches of frames, and a small network trained by CTC on any mesh.

    python examples/audio_notes.py

Half a minute on a laptop, which plays eight devices. The clips are made here: three to seven notes each, sines
in noise, as WAV and FLAC, the names of the notes beside them. Speech with its transcripts goes the same way.
"""

import os

# Before JAX is imported: one CPU poses as eight devices. Where there are accelerators this changes nothing.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import soundfile
from flax import nnx

import jaxtrain as jt
from jaxtrain.data import BucketedBatches, SequenceRows
from jaxtrain.data.loading.bucketing import choose, equal_sizes
from jaxtrain.data.prepare_sequences.audio import MELS, RATE, Audio
from jaxtrain.data.prepare_sequences.prepare_sequences import prepare_sequences, summary

NOTES = "CDEFGAB"
HERTZ = 261.6 * 2 ** (np.array([0, 2, 4, 5, 7, 9, 11]) / 12)
CLIPS, STEPS, WIDTH, CONTEXT = 200, 80, 64, 5


# ------------------------------------------------------------------------------------------------------------- the data
def write_clips(folder: Path):
    rng = np.random.default_rng(0)
    for i in range(CLIPS):
        melody = rng.integers(0, len(NOTES), rng.integers(3, 8))
        sound = [np.zeros(400)]
        for note in melody:
            time = np.arange(int(RATE * rng.uniform(0.06, 0.14))) / RATE
            sound += [rng.uniform(0.2, 0.5) * np.sin(2 * np.pi * HERTZ[note] * time), np.zeros(640)]
        samples = np.concatenate(sound)
        path = folder / f"{i:03}{'.wav' if i % 2 else '.flac'}"
        soundfile.write(path, samples + 0.005 * rng.normal(size=len(samples)), RATE)
        path.with_suffix(".txt").write_text("".join(NOTES[note] for note in melody))


def batches_of(sequences, mesh, repeat=True):
    """Each clip a row; three lengths of rows, with about as many frames in every batch."""
    rows = SequenceRows(sequences)
    buckets = choose(rows.lengths, 3, multiple=8)
    sizes = equal_sizes(buckets, places=2000, multiple=mesh.size)
    return BucketedBatches(rows, buckets=buckets, global_batch_size=sizes, seed=0, repeat=repeat)


# ------------------------------------------------------------------------------------------------------------ the model
class Listener(nnx.Module):
    """A model that names the note played at every second frame, or answers (id 0) nothing new."""

    def __init__(self, rngs: nnx.Rngs):
        def normal(*shape):
            return jax.random.normal(rngs.params(), shape) / np.sqrt(np.prod(shape[:-1]))

        self.hear = nnx.Param(normal(CONTEXT, MELS, WIDTH), axes=(None, None, "embed"))
        self.think = nnx.Param(normal(WIDTH, 2 * WIDTH), axes=("embed", "mlp"))
        self.say = nnx.Param(normal(2 * WIDTH, 1 + len(NOTES)), axes=("mlp", None))

    def __call__(self, features):
        x = jax.lax.conv_general_dilated(features.astype(jnp.float32), self.hear[...], (2,), "SAME",
                                         dimension_numbers=("NWC", "WIO", "NWC"))
        return jax.nn.gelu(jax.nn.gelu(x) @ self.think[...]) @ self.say[...]


def letters_to_ids(letters):
    """The transcripts are bytes; 1 is the first note."""
    return sum((letters == ord(note)) * (i + 1) for i, note in enumerate(NOTES))


def loss_fn(model, batch):
    losses = optax.ctc_loss(model(batch["features"]), 1 - batch["weights"][:, ::2],
                            letters_to_ids(batch["target"]), 1 - batch["target_weights"])
    there = batch["weights"][:, 0]  # rows that only fill the last batch are not learnt
    return jt.Weighted((losses * there).sum(), batch["target_weights"].sum())


# ------------------------------------------------------------------------------------------------------------- training
def transcribe(model, batch):
    """The best id at each frame, repetitions and silence left out."""
    best = np.asarray(jnp.argmax(model(batch["features"]), -1))
    for frames, weights in zip(best, batch["weights"][:, ::2], strict=True):
        frames = frames[weights > 0]
        changes = frames[np.flatnonzero(np.diff(frames, prepend=-1))]
        yield "".join(NOTES[id - 1] for id in changes if id)


def main():
    devices = jax.devices() if jax.device_count() >= 8 else jax.devices("cpu")
    mesh = jt.make_mesh(data=4, fsdp=2, devices=devices[:8])
    with tempfile.TemporaryDirectory() as folder:
        clips = Path(folder, "clips")
        clips.mkdir()
        write_clips(clips)
        corpus = prepare_sequences([str(clips)], Path(folder, "corpus"), Audio(target="text", eval_fraction=0.1))
        print(summary(corpus))
        batches = batches_of(corpus.train, mesh)
        print(f"batches of (rows, frames): {batches.shapes}")
        step = jt.make_train_step(loss_fn, optax.adam(optax.cosine_decay_schedule(2e-2, STEPS)), mesh=mesh,
                                  rules=jt.rules("fsdp"), clip_norm=1.0)
        state = step.init(lambda: Listener(nnx.Rngs(0)))
        for n in range(STEPS):
            state, metrics = step(state, batches[n])
            if n % 5 == 0 or n == STEPS - 1:
                print(f"step {n:3}  {len(batches[n]['features']):3} rows of {batches.length(n):3}  "
                      f"loss a note {float(metrics['loss']):7.4f}")
        model, right, all_ = step.module(state), 0, 0
        held_out = batches_of(corpus.eval, mesh, repeat=False)
        for n in range(held_out.num_batches):
            batch = held_out[n]
            said_B, ids_B, there_B = transcribe(model, batch), batch["target"], batch["target_weights"]
            for said, ids, there in zip(said_B, ids_B, there_B, strict=True):
                wanted = bytes(ids[there > 0].tolist()).decode()
                right, all_ = right + (said == wanted and bool(wanted)), all_ + bool(wanted)
        print(f"melodies that were not trained on, transcribed without a mistake: {right} of {all_}")


if __name__ == "__main__":
    main()
