"""The table of refusals: each row refuses its example, lets the nearest combination pass, and stands in the docs."""

import functools
from pathlib import Path

import jax
import pytest

import jaxtrain as jt
from jaxtrain import extensions
from jaxtrain.kernels.attention import mosaic_attention
from jaxtrain.run import validation
from tests.objectives import plain_transcription, plain_vision

MORE = [row for extension in extensions.every() for row in extension.refusals]
DOCS = Path(__file__).parents[2] / "docs/parallelism.md"


def build(**overrides):
    """The tiny GPT on an abstract mesh of as many devices as it asks for."""
    config = jt.load_config("configs/gpt.py:tiny", {"mesh.data": 1} | overrides)
    m = config.mesh
    return jt.build(config, devices=m.data * m.fsdp * m.stage * m.context * m.expert * m.tensor)


@pytest.mark.parametrize("row", [*validation.TABLE, *MORE], ids=lambda row: row.combination)
def test_each_row_refuses_its_example(row):
    with pytest.raises(jt.UserError) as refusal:
        build(**row.example)
    axis = row.key.replace("AXIS", "tensor")
    assert refusal.value.key == axis and validation.explains(refusal.value), str(refusal.value)

@pytest.mark.slow
@pytest.mark.parametrize("row", [*validation.TABLE, *MORE], ids=lambda row: row.combination)
def test_the_nearest_combination_that_works_lowers(row):
    build(**(row.example | row.instead)).lower()


def test_the_docs_have_the_table():
    table = validation.table(MORE)
    assert table in DOCS.read_text(), f"docs/parallelism.md must have this table:\n{table}"


RING = {"mesh__context": 2, "mesh__context_strategy": "ring"}
GATHER = RING | {"mesh__context_strategy": "gather"}
APART, TILES = "its keys are those of the queries' own tokens", "mesh.context_strategy=gather cannot use it"


@pytest.mark.parametrize(("kind", "backend", "keys", "why"), [
    ("whisper", "mosaic", {}, APART), ("whisper", "splash", {}, ""), ("whisper", "splash", GATHER, TILES),
    ("whisper", "splash", RING, ""),
    ("siglip", "mosaic", {}, ""), ("siglip", "mosaic", RING, APART), ("image_flow", "mosaic", RING, APART),
    ("siglip", "splash", RING, ""), ("clip", "splash", GATHER, TILES),
    ("vision_language", "splash", GATHER, TILES)])
def test_a_kernel_that_a_family_cannot_take_is_refused_before_anything_is_traced(kind, backend, keys, why, monkeypatch):
    """Other keys than the queries' own have no mosaic kernel; a strategy is for causal attention alone."""
    monkeypatch.setattr(mosaic_attention, "refusal", lambda *_, **__: "")
    config_of = plain_transcription.config if kind == "whisper" else functools.partial(plain_vision.config, kind)
    config = config_of(**keys, train__attention=backend)
    devices = jax.devices()[:config.mesh.context]
    if not why:
        jt.build(config, devices=devices)
        return
    with pytest.raises(jt.UserError, match=f"train.attention: the {backend} backend cannot do this: {why}"):
        jt.build(config, devices=devices)
