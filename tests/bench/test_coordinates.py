"""The coordinate check: what it measures is what a model computes, and it tells what grows with width."""

import json

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.bench import coordinates
from jaxtrain.commands import coordinates as coordinates_command
from tests.numerics import reference
from tests.tiers import exhaustive
from tests.tiny import tiny_flags


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return [*tiny_flags(tmp_path_factory, ["train.precision=float32"]), "--widths=32,256", "--steps=3"]


BASE = ["--config.model.mup_base.embed_dim=32", "--config.model.mup_base.num_heads=2"]


@pytest.mark.slow
def test_it_tells_what_grows_with_width(flags, tmp_path, capsys):
    slopes = {}
    for name, more, status in (("without", [], 1), ("with", BASE, 0)):
        said = ["--json", f"--output={tmp_path / 'page'}"]
        try:
            assert coordinates_command.main([*flags, *more, *said]) == status == 0
        except SystemExit as stop:
            assert stop.code == status == 1
        found = json.loads(capsys.readouterr().out)
        slopes[name] = {key: both["change"] for key, both in found["slopes"].items()}
        assert bool(found["growing"]) == bool(status)
    assert slopes["without"]["logits"] > 0.3 and slopes["without"]["layer 1 residual"] > 0.3
    assert all(abs(slope) < 0.3 for slope in slopes["with"].values()), slopes["with"]
    assert abs(slopes["with"]["logits"]) < 0.15
    assert (tmp_path / "page").read_text().count("<svg") == len(slopes["with"])


@pytest.mark.parametrize("family", [*exhaustive("alternating", "gpt2", "gemma3", "deepseek_v3", "gpt_oss")])
def test_activations_are_those_that_the_model_computes(family):
    """The last residual is what the model has before its last norm, and logits are its own."""
    run = reference.build(family)
    batch = reference.batch(0)
    model = run.module(run.init())
    found = jax.jit(coordinates.activations)(model, batch)
    x, _ = model.through(model.begin(batch["tokens"], batch["positions"]), batch["segments"], batch["positions"])
    layers = run.config.model.num_layers
    np.testing.assert_allclose(found[f"layer {layers - 1} residual"], x, rtol=1e-4, atol=1e-5)
    logits = model(batch["tokens"], batch["segments"], batch["positions"])
    np.testing.assert_allclose(found["logits"], logits, rtol=1e-4, atol=1e-5)
    if family not in ("gemma3", "gpt2"):  # Gemma normalises what it adds
        before = found["layer 0 residual"] + found["layer 1 attention"] + found["layer 1 mlp"]
        np.testing.assert_allclose(before, found["layer 1 residual"], rtol=1e-4, atol=1e-5)
    assert len(found) == 2 + 3 * layers


def test_a_slope_is_the_power_of_the_width():
    found = {width: {"2": {"x": {"size": 3 * width**0.5, "change": 0.1 * width**-1}}} for width in (64, 128, 512)}
    assert coordinates.slopes_of(found) == {"x": {"size": pytest.approx(0.5), "change": pytest.approx(-1)}}
    found[64]["2"]["x"]["size"] = float("nan")
    assert coordinates.slopes_of(found)["x"]["size"] == float("inf")  # it grew beyond all numbers


def test_other_widths_grow_along():
    config = jt.make_config({"model": reference.EXPERTS["deepseek_v3"] | {"embed_dim": 32, "vocab_size": 64}})
    more, wider = (coordinates.wider(config, 64, grow) for grow in ("heads", "head_dim"))
    assert {"model.kv_rank": 48, "model.q_rank": 32, "model.expert_mlp_dim": 48, "model.num_heads": 16,
            "model.num_kv_heads": 16, "model.head_dim": 4}.items() <= more.items()
    assert {"model.num_heads": 8, "model.head_dim": 8}.items() <= wider.items()
    with pytest.raises(jt.UserError, match=r"--widths: 36 makes model.num_heads=8 into 9; give|divides"):
        coordinates.wider(config, 34)


@pytest.mark.parametrize(("widths", "message"), [
    ("64", "--widths: '64' are not two widths or more; write 64,128,256"),
    ("64,x", "--widths: '64,x' are not widths; write 64,128,256"),
    ("64,96,100", "--widths: 100 makes model.num_heads=4 into 6.25; give multiples of model.embed_dim=64"),
])
def test_what_are_no_widths_is_told_in_one_line(widths, message, capsys):
    assert coordinates_command.main(["--config=configs/gpt.py:tiny", f"--widths={widths}"]) == 2
    assert capsys.readouterr().err.startswith(message)
