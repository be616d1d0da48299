"""Names of targets, targets of one's own, and what is told of wrong ones."""

import json
from pathlib import Path

import pytest

from jaxtrain.config.load import load_config
from jaxtrain.errors import UserError
from jaxtrain.plan import targets
from jaxtrain.plan.estimate import estimate
from jaxtrain.plan.report.table import explained, figures_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("text", "name", "count"), [
    ("h100x256", "h100", 256), ("b200", "b200", 1), ("v5p-512", "v5p", 256), ("v6e-256", "v6e", 256),
    ("GB200x72", "gb200", 72), ("gb300x72", "gb300", 72), ("tpu8t-64", "tpu8t", 64), ("mi355xx8", "mi355x", 8),
    ("cpux8", "cpu", 8)])
def test_names(text, name, count):
    target, devices = targets.parse(text)
    assert (target.name, devices) == (name, count)


@pytest.mark.parametrize(("size", "said"), [
    (1.25e6, "0.0013 GB"), (2.5e10, "25.0 GB"), (9.9e12, "9900.0 GB"), (2.903744e14, "290.4 TB"), (4.8e16, "48.0 PB"),
    (1e30, "1000000000000.0 EB")])
def test_sizes_have_a_unit_that_suits_them(size, said):
    assert targets.in_gigabytes(size) == said


@pytest.mark.parametrize("text", ["h1000x8", "x8", "h100x0", "", "h100x8x8", "v5p-3"])
def test_wrong_names(text):
    with pytest.raises(UserError, match="--target"):
        targets.parse(text)


def test_a_target_of_ones_own(tmp_path):
    file = tmp_path / "mine.json"
    near = {"name": "NVLink", "devices": 4, "bandwidth": 3e11, "latency": 1e-6}
    mine = {"like": "h100", "price": 1.5, "efficiency": {"matmul": 0.7}, "links": [near]}
    file.write_text(json.dumps({"mine": mine}))
    target, devices = targets.parse("minex16", file)
    assert (target.price, target.efficiency["matmul"], target.links[0].devices, devices) == (1.5, 0.7, 4, 16)
    assert target.peak == targets.TARGETS["h100"].peak


@pytest.mark.parametrize(("keys", "said"), [
    ({"like": "h1"}, "not known"), ({"like": "h100", "prize": 1}, "prize"),
    ({"like": "h100", "price": "cheap"}, "price is"), ({"like": "h100", "price": -2}, "price is -2"),
    ({"like": "h100", "efficiency": {"matmul": 7}}, "matmul is 7"),
    ({"like": "h100", "links": 3}, "links is 3"), ({"like": "h100", "links": [{"name": "x"}]}, "give name, devices"),
    ("h100", "does not hold targets"),
])
def test_a_wrong_target_of_ones_own(tmp_path, keys, said):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"mine": keys}))
    with pytest.raises(UserError, match=said):
        targets.parse("minex8", file)


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        targets.parse("h100x8", tmp_path / "missing.json")


def test_every_target_has_its_source():
    for target in targets.TARGETS.values():
        assert target.source and target.peak["bfloat16"] and target.links and target.price > 0


def test_a_target_whose_rates_are_of_another_says_so():
    config = load_config(f"{ROOT / 'configs/gpt.py'}:tiny", {"mesh.data": 1})
    of = {name: estimate(config, targets.TARGETS[name], 1) for name in ("h100", "gb300", "mi300x")}
    assert "rates of h100: none was fitted to runs on gb300" in explained(of["gb300"])
    assert "none was fitted" not in explained(of["h100"]) and figures_of(of["h100"], 1e9)["rates_of"] == "h100"
    assert "runs on mi300x" in explained(of["mi300x"]) and of["mi300x"].interval is None
    assert figures_of(of["mi300x"], 1e9)["rates_of"] == "h100"
    for target in targets.TARGETS.values():
        assert target.rates_of in ("", *targets.TARGETS) and not targets.TARGETS.get(target.rates_of or "h100").rates_of


@pytest.mark.parametrize(("name", "rounded"), [("h100", 989e12 / 2), ("v5p", 459e12), ("cpu", 6e10)])
def test_products_of_float32_may_be_rounded(name, rounded):
    """To TF32 by GPUs, to bfloat16 by TPUs; CPUs round nothing."""
    target = targets.TARGETS[name]
    assert target.products("float32", rounds=True) == rounded
    assert target.products("float32", rounds=False) == target.peak["float32"]
    assert target.products("bfloat16", rounds=True) == target.peak["bfloat16"]
