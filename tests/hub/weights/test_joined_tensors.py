"""Folders with the tensors that transformers has in memory: experts and convolutions joined, and other names."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxtrain as jt
from tests.hub import multi_token, published
from tests.hub.published_models import loaded
from tests.tiers import slow

TRUTH = json.loads((Path(__file__).parents[1] / "joined_truth.json").read_text())
QUICK = ["qwen3_5_moe", "mixtral", "nemotron_h_latent", "granitemoe", "kimi_linear", "olmo_hybrid"]


def joined(case: dict, as_other: dict) -> tuple[dict, dict]:
    """A case with tensors as transformers joins them, and of which others each of those is made."""
    gone = {one for _, of in as_other.values() for one in of}
    kept = {name: shape for name, shape in case["tensors"].items() if name not in gone}
    return dict(case, tensors=kept | {name: shape for name, (shape, _) in as_other.items()}), {
        name: [(one, case["tensors"][one]) for one in of] for name, (_, of) in as_other.items()}


def write(folder: Path, case: dict, as_other: dict, plain=published.weight) -> Path:
    """The folder of a case with joined tensors."""
    whole, parts = joined(case, as_other)
    return published.write(folder, whole, weight=lambda name, shape: plain(name, shape) if name not in parts else (
        np.concatenate([plain(*one).reshape(-1) for one in parts[name]]).reshape(shape)))


def same(one, other) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in TRUTH if name not in QUICK))])
def test_both_forms_have_the_same_parameters(name, tmp_path):
    case = published.truth(name)
    plain = loaded(published.write(tmp_path / "in", case))[1]
    same(loaded(write(tmp_path / "joined", case, TRUTH[name]))[1], plain)


def test_experts_of_the_layer_that_predicts_further_tokens_may_be_joined(tmp_path):
    case, keys = multi_token.case("qwen3_next"), {"mtp_loss_weight": 0.3}
    at, experts = "mtp.layers.0.mlp.experts", range(8)
    ahead = {f"{at}.gate_up_proj": ([8, 12, 16], [f"{at}.{n}.{name}_proj.weight" for n in experts
                                                  for name in ("gate", "up")]),
             f"{at}.down_proj": ([8, 16, 6], [f"{at}.{n}.down_proj.weight" for n in experts])}
    plain = loaded(multi_token.write(tmp_path / "in", "qwen3_next"), keys)[1]
    same(loaded(write(tmp_path / "joined", case, TRUTH["qwen3_next"] | ahead, multi_token.weight), keys)[1], plain)


def test_joined_tensors_are_read_on_a_mesh(tmp_path):
    case = published.truth("qwen3_5_moe")
    plain = loaded(published.write(tmp_path / "in", case), fsdp=2, expert=2, tensor=2)[1]
    same(loaded(write(tmp_path / "joined", case, TRUTH["qwen3_5_moe"]), fsdp=2, expert=2, tensor=2)[1], plain)


@pytest.mark.parametrize(("turned", "more", "reason"), [
    (True, {}, r"gate_up_proj has the shape \[8, 16, 40\] where the model needs \[8, 40, 16\]"),
    (False, {"model.layers.0.mlp.experts.0.up_proj.weight": [6, 16]},
     r"both model.layers.0.mlp.experts.gate_up_proj and model.layers.0.mlp.experts.0.up_proj.weight, which are the"),
])
def test_what_does_not_fit_is_refused_by_name(turned, more, reason, tmp_path):
    case, as_other = published.truth("olmoe"), TRUTH["olmoe"]
    whole, _ = joined(case, as_other)
    for name, shape in whole["tensors"].items():
        if turned and name.endswith("gate_up_proj"):
            whole["tensors"][name] = [8, *shape[:0:-1]]
    with pytest.raises(jt.UserError, match=reason):
        loaded(published.write(tmp_path, dict(whole, tensors=whole["tensors"] | more)))
