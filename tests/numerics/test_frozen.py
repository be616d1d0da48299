"""Frozen parameters: they stay, and on any mesh the others have the loss and gradients of plain training."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.plan.estimate import estimate
from jaxtrain.plan.targets import TARGETS
from jaxtrain.train_step import partition
from tests.numerics import reference
from tests.tiny import devices

FREEZE = ("embed/*", "blocks/layer/attention/*")
CASES = {
    "one device": ("llama", {}),
    "fsdp x tensor, ZeRO, accumulation": ("llama", dict(mesh=(2, 2, 2), optimizer__zero_stage=2,
                                                        train__accumulation=2)),
    "remat, context": ("llama", dict(mesh=(2, 1, 1), mesh__context=2, train__remat="full")),
    "1f1b": ("llama", dict(mesh=(1, 2, 2), mesh__stage=2)),
    "zero-bubble": ("llama", dict(mesh=(2, 1, 1), mesh__stage=2, pipeline__schedule="zb_h1")),
    "offload": ("llama", dict(mesh=(2, 1, 1), optimizer__offload=True)),
    "all products of layers frozen, zero-bubble": ("llama", dict(
        mesh=(1, 1, 1), mesh__stage=2, pipeline__schedule="zb_h1",
        train__freeze=["blocks/layer/attention/*", "blocks/layer/mlp/*"])),
    "all layers frozen, 1f1b": ("llama", dict(mesh=(1, 1, 1), mesh__stage=2, train__freeze=["blocks/*"])),
}
EXHAUSTIVE = ("remat, context", "1f1b", "one device", "zero-bubble", "offload")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.exhaustive if name in EXHAUSTIVE else pytest.mark.slow) for name in CASES])
def test_the_rest_learns_as_in_plain_training(name):
    family, keys = CASES[name]
    run = reference.build(family, **(dict(train__freeze=list(FREEZE)) | keys))
    params = reference.initial(family)
    losses, gradient, *_ = reference.trained(family)
    want = partition.like(gradient, run.layout.axes)
    frozen = partition.without(params, run.layout.axes)
    assert jax.tree.leaves(frozen) and jax.tree.structure(run.abstract.frozen) == jax.tree.structure(frozen)
    moments = [leaf.shape for leaf in jax.tree.leaves(reference.moments(run.abstract))]
    assert moments == [leaf.shape for leaf in jax.tree.leaves(run.abstract.params)], "a frozen parameter has moments"

    state, metrics = reference.compiled(run)(reference.start_from(run, params), run.sharded.place(reference.batch(0)))
    norm, o = float(reference.norm_of(want)), run.config.optimizer
    assert float(metrics["loss"]) == pytest.approx(losses[0], rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5), "the norm is of what is trained"
    got = jax.tree.map(lambda m: np.asarray(m) / (1 - o.b1) / min(1, o.clip_norm / norm), reference.moments(state))
    error, leaf = reference.worst(got, want, floor=1e-3 * norm)
    assert error < 1e-5, leaf
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), state.frozen, frozen)), "one has changed"


@pytest.mark.exhaustive
@devices(2)
def test_frozen_parameters_rest_in_their_own_dtype_and_are_checkpointed(tmp_path):
    (tmp_path / "text.txt").write_text("a line of text\n" * 200)
    config = reference.tiny(train__freeze=["vocab"], train__frozen_dtype="bfloat16", train__steps=4,
                            train__precision="bfloat16", mesh__data=2, model__vocab_size=320,
                            data__source=str(tmp_path / "text.txt"), data__cache_dir=str(tmp_path / "cache"),
                            resilience__check_every=0)
    state = jt.train(config, tmp_path / "run")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.frozen)} == {"bfloat16"}
    again = jt.train(config, tmp_path / "run")
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), state, again))


def test_frozen_routers_keep_float32():
    run = reference.build("deepseek_v3", train__freeze=["blocks/*"], train__frozen_dtype="bfloat16",
                          train__precision="bfloat16")
    mlp = run.abstract.frozen["blocks"]["layer"]["mlp"]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(mlp["router"])} == {"float32"}
    assert mlp["gate"].dtype == "bfloat16"


def test_zero_3_spreads_frozen_parameters_too():
    run = reference.build("llama", mesh=(4, 1, 1), train__freeze=["blocks/*"], optimizer__zero_stage=3)
    leaf = run.abstract.frozen["blocks"]["layer"]["mlp"]["up"]["kernel"]
    assert "data" in leaf.sharding.spec and leaf.sharding.spec[0] is None


@pytest.mark.parametrize(("keys", "match"), [
    (dict(train__freeze=["blocs/*"]), r"train.freeze.*'blocs/\*'"),
    (dict(train__freeze=[1]), r"train\.freeze: 1 is not text"),
    (dict(train__freeze=["*"]), "nothing is left to train"),
    (dict(train__freeze=["embed/*"], train__trainable=["blocks/*"]), "one of the two"),
])
def test_bad_patterns_are_refused(keys, match):
    with pytest.raises(jt.UserError, match=match):
        reference.build(**keys)


def test_only_what_is_trainable_is_trained():
    run = reference.build("llama", train__trainable=["*_norm/*"])
    paths = {jax.tree_util.keystr(path, simple=True, separator="/")
             for path, _ in jax.tree_util.tree_flatten_with_path(run.abstract.params)[0]}
    assert paths == {"blocks/layer/attention_norm/scale", "blocks/layer/mlp_norm/scale"}


def test_the_planner_counts_frozen_parameters():
    config = reference.tiny("llama", train__freeze=["blocks/*"], mesh__data=1)
    guess = estimate(config, TARGETS["h100"], 1)
    frozen = reference.build("llama", train__freeze=["blocks/*"]).abstract.frozen
    assert guess.memory["frozen parameters"] == sum(leaf.size * 4 for leaf in jax.tree.leaves(frozen)) > 0
