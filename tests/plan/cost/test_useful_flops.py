"""Counted by hand, and against all products of a traced step that repeats none."""

from pathlib import Path

import pytest

from jaxtrain.builder import build
from jaxtrain.config.load import load_config
from jaxtrain.plan.cost import useful_flops
from jaxtrain.plan.trace import reader
from jaxtrain.run import shapes_of
from jaxtrain.train_step.report import matmul_parameters

CONFIGS = Path(__file__).parents[3] / "configs"
ONE = {"mesh.data": 1, "mesh.fsdp": 1, "train.remat": "none"}


def of(name, **overrides):
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    return build(load_config(CONFIGS / name, ONE | keys), devices=1)


def layer(dim, mlp):
    """The parameters of attention's four matrices and the MLP's two."""
    return 4 * dim**2 + 2 * dim * mlp


def test_images_and_texts():
    """128 patches of 4 x 4 x 3 values: four images, each of which attends to its own 32, with texts of 24 tokens."""
    patches = 2 * layer(64, 256) * 128 + 4 * 4 * 3 * 64 * 128 * 2 / 3
    pooled = 2 * 64**2 * 128 + (64**2 + 2 * 64 * 256) * 4  # keys and values of patches, then a vector an image
    texts, heads = 2 * layer(64, 256) * 4 * 24, 2 * 64**2 * 4
    attention = 2 * 64 * 128 * 32 + 64 * 128 + 2 * 64 * 4 * 24**2
    assert useful_flops.of_row(of("siglip_b16.py:tiny")) == pytest.approx(
        6 * (patches + pooled + texts + heads) + 12 * attention)


def test_a_frozen_encoder_has_no_gradients_of_its_matrices_and_clips_texts_look_back():
    plain, frozen, causal = (useful_flops.of_row(of("siglip_b16.py:tiny", **keys)) for keys in (
        {}, {"train__freeze": ["image/*"]}, {"model__name": "clip"}))
    assert plain - frozen == pytest.approx(2 * (2 * layer(64, 256) * 128 + 4 * 4 * 3 * 64 * 128 * 2 / 3))
    assert plain - causal == pytest.approx(12 * 2 * 64 * 4 * 24**2 / 2)


def test_images_of_flow_matching():
    """Four images of 32 patches; an image's time is 128 sines and cosines."""
    patches = 2 * layer(64, 256) * 128 + 48 * 64 * 128 * (1 + 2 / 3)  # from values, which have no gradient, and back
    times = (128 * 64 * 2 / 3 + 64**2) * 4
    assert useful_flops.of_row(of("image_flow.py:tiny")) == pytest.approx(
        6 * (patches + times) + 12 * 2 * 64 * 128 * 32)


def test_speech():
    """256 frames of 80 bands, 128 positions of the encoder and 40 tokens, of 320; CTC's head reads the positions."""
    frames = 3 * 80 * 96 * 256 * 2 / 3 + 3 * 96**2 * 128
    encoder = 2 * layer(96, 384) * 128 + 320 * 96 * 128
    decoder = 2 * (layer(96, 384) + 2 * 96**2) * 40 + 2 * 2 * 96**2 * 128 + 320 * 96 * 40
    attention = 2 * 96 * (128**2 + 40 * 20 + 40 * 128)
    assert useful_flops.of_row(of("whisper.py:words")) == pytest.approx(
        6 * (frames + encoder + decoder) + 12 * attention)


@pytest.mark.parametrize(("back", "pairs"), [(0, 50 * 50 + 50 * 100 + 28 * 128), (1, 50 * 50 + 50 * 100 + 28 * 78)])
def test_speech_in_chunks(back, pairs):
    """Positions see their own chunk of 50 and all before it, or one."""
    whole, cut = (useful_flops.of_row(of("whisper.py:words", **keys)) for keys in (
        {}, {"model__audio_chunk": 50, "model__audio_chunks_back": back}))
    assert whole - cut == pytest.approx(12 * 2 * 96 * (128**2 - pairs))


def test_of_images_among_text_it_is_not_known():
    assert useful_flops.of_row(of("vision_language.py:tiny")) == 0


@pytest.mark.parametrize(("name", "more"), [("siglip_b16.py:tiny", 0.001), ("image_flow.py:tiny", 0.001),
                                            ("whisper.py:words", 0.04)])
def test_a_step_that_repeats_nothing_has_little_else(name, more):
    """Rows have one image each, so that none of its attention is masked.

    Whisper computes its first convolution three times, and the half of its decoder's attention that causality masks.
    """
    run = of(name, **({} if "whisper" in name else {"model__images_per_row": 1}))
    program = run.sharded.trace(shapes_of(run).abstract()).jaxpr
    traced = reader.read(program, dict(run.mesh.shape), "cpu", (), 1.0, run.config.model.windows)
    useful = useful_flops.of_row(run) * run.config.data.global_batch_size
    assert 1 <= sum(op.flops * times for op, times in traced.all()) / useful < 1 + more


@pytest.mark.parametrize("keys", [{}, {"lora__rank": 4},
                                  {"lora__rank": 4, "lora__init": "pissa", "train__init_from": "/models/llama"}])
def test_matrices_are_those_that_a_decoder_of_text_counts(keys):
    """The adapters of PiSSA have frozen copies of their start, which are multiplied by, too."""
    run = of("llama3_8b.py:tiny", **keys)
    known = matmul_parameters(run.abstract, run.layout, run.config.model, run.objective.frozen_axes)
    assert sum(size for _, size in useful_flops._matrices(run)) == pytest.approx(known)
