"""Adapters of low rank: the loss and gradients of the model that they amount to, on any mesh; all else stays."""

import re

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.models.lora import is_adapter, scale
from jaxtrain.train_step import partition
from tests.numerics import reference
from tests.numerics.plain_lora import at_random, merged
from tests.tiers import slow_if

LORA = dict(lora__rank=3, lora__alpha=6.0)
CASES = {
    "tensor": ("llama", dict(mesh=(1, 2, 4))),
    "one device": ("gpt2", {}),
    "all axes": ("gpt2", dict(mesh=(2, 2, 2), train__accumulation=2, optimizer__zero_stage=2)),
    "remat by layer": ("qwen3", dict(mesh=(2, 1, 2), train__remat="full:1,attention_and_dots")),
    "context": ("llama", dict(mesh=(1, 1, 2), mesh__context=2)),
    "1f1b": ("llama", dict(mesh=(1, 2, 2), mesh__stage=2)),
    "zero-bubble": ("llama", dict(mesh=(1, 1, 2), mesh__stage=2, pipeline__schedule="zb_h1")),
    "latents, experts": ("deepseek_v3", dict(mesh=(1, 2, 2), mesh__expert=2, optimizer__zero_stage=3)),
    "attention only, beside norms": ("gemma3", dict(mesh=(1, 2, 2), lora__targets=["*/attention/*"],
                                                    train__trainable=["*norm*"], lora__rank_stabilized=True)),
    "looks ahead": ("deepseek_v3", dict(mesh=(1, 2, 2), model__mtp_loss_weight=0.3, lora__quantize="int8")),
    "nf4, tensor": ("llama", dict(mesh=(1, 2, 2), lora__quantize="nf4")),
    "int8, all axes": ("gpt2", dict(mesh=(2, 2, 2), train__accumulation=2, optimizer__zero_stage=3,
                                    lora__quantize="int8")),
    "nf4, remat, context": ("qwen3", dict(mesh=(1, 2, 1), mesh__context=2, train__remat="full", lora__quantize="nf4")),
    "nf4, zero-bubble": ("llama", dict(mesh=(1, 1, 2), mesh__stage=2, pipeline__schedule="zb_h1",
                                       lora__quantize="nf4")),
    "nf4, latents, experts": ("deepseek_v3", dict(mesh=(1, 2, 2), mesh__expert=2, lora__quantize="nf4")),
    "experts": ("mixtral", dict(mesh=(1, 2, 2), mesh__expert=2, lora__experts=True)),
    "experts, biases, buffers": ("gpt_oss", dict(mesh=(1, 2, 1), mesh__expert=4, lora__experts=True,
                                                 train__expert_buffer=0.5, lora__targets=["*/mlp/*", "*/q"])),
    "experts, 1f1b, look ahead": ("deepseek_v3", dict(mesh=(1, 2, 2), mesh__stage=2, lora__experts=True,
                                                      lora__quantize="int8", train__remat="full",
                                                      model__mtp_loss_weight=0.3)),
    "dora, tensor": ("gpt2", dict(mesh=(1, 2, 2), lora__dora=True)),
    "dora, all axes": ("llama", dict(mesh=(2, 2, 2), train__accumulation=2, optimizer__zero_stage=3, lora__dora=True)),
    "dora, nf4, remat, context": ("qwen3", dict(mesh=(1, 2, 1), mesh__context=2, train__remat="full",
                                                lora__quantize="nf4", lora__dora=True)),
    "dora, zero-bubble": ("llama", dict(mesh=(1, 1, 2), mesh__stage=2, pipeline__schedule="zb_h1", lora__dora=True,
                                        lora__rank_stabilized=True)),
    "dora, latents, experts": ("deepseek_v3", dict(mesh=(1, 2, 2), mesh__expert=2, lora__dora=True)),
}
CASES |= {f"pissa, {name}": (CASES[name][0], CASES[name][1] | dict(lora__init="pissa", train__init_from="unread"))
          for name in ("all axes", "zero-bubble", "latents, experts")}
QUICK = ("tensor",)
# The others have meshes and kinds of adapters that are in these, too.
SLOW = ("dora, nf4, remat, context", "pissa, all axes")


@pytest.mark.parametrize("name", [
    name if name in QUICK else pytest.param(
        name, marks=slow_if(name in SLOW)) for name in CASES])
def test_loss_and_gradients_are_those_of_the_merged_model(name):
    family, keys = CASES[name]
    run = reference.build(family, **(LORA | keys))
    params = at_random(initial(run))
    config, batch = run.config, reference.batch(0)
    trained = partition.like(params, run.layout.axes)

    def truth(trained):
        whole = partition.merge(trained, partition.without(params, trained))
        return reference.loss(config.model, merged(whole, scale(config.lora)), batch, config.train.z_loss)

    loss, want = jax.jit(jax.value_and_grad(truth))(trained)
    state, metrics = reference.compiled(run)(reference.start_from(run, params), run.sharded.place(batch))
    norm, o = float(reference.norm_of(want)), config.optimizer
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    got = jax.tree.map(lambda m: np.asarray(m) / (1 - o.b1) / min(1, o.clip_norm / norm), reference.moments(state))
    error, leaf = reference.worst(got, jax.device_get(want), floor=1e-3 * norm)
    assert error < 1e-5, leaf
    frozen = partition.without(params, run.layout.axes)
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(state.frozen), frozen)), "one has changed"
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), jax.device_get(state.params), trained)
    assert all(jax.tree.leaves(moved)), "one is not trained"


def initial(run):
    """All parameters at step 0, on the host."""
    seed = np.int64(0)
    return jax.device_get(run._jitted_init.lower(seed).compile(compiler_options=reference.QUICKLY)(seed).all_params)


@pytest.mark.exhaustive
def test_a_model_begins_as_the_one_that_is_adapted():
    plain, run = reference.build("llama"), reference.build("llama", **LORA)
    tokens = reference.batch(0)["tokens"]
    one, other = (run.module(run.init())(tokens) for run in (plain, run))
    np.testing.assert_array_equal(one, other)


def test_only_adapters_have_moments():
    run = reference.build("llama", **LORA)
    assert all(map(is_adapter, flatten(run.abstract.params))) and not any(map(is_adapter, flatten(run.abstract.frozen)))
    assert len(jax.tree.leaves(reference.moments(run.abstract))) == len(jax.tree.leaves(run.abstract.params)) == 14


@pytest.mark.slow
def test_the_compiled_step_has_gradients_of_adapters_alone():
    """No product in it has the shape of a frozen matrix, where the step of the whole model has one for each."""
    def of_matrices(**keys):
        run = reference.build("llama", **keys)
        tokens = run.config.data.global_batch_size * run.config.data.seq_len
        found = re.findall(r"= f32\[(\d+),(\d+)\]\S* dot\(", reference.compiled(run).as_text())
        return [shape for shape in (tuple(map(int, pair)) for pair in found) if tokens not in shape]

    adapted, whole = of_matrices(**LORA), of_matrices()
    assert len(adapted) == 14 and all(LORA["lora__rank"] in shape for shape in adapted)
    assert len(whole) == 8, "seven linear layers, and the output projection"


@pytest.mark.parametrize(("keys", "message"), [
    (dict(lora__targets=["*/attention/query"]), "lora.targets: no linear layer's path matches '*/attention/query'; "),
    (dict(lora__targets=["lm_head"]), "lora.targets: no linear layer's path matches 'lm_head'"),
    (dict(lora__targets=["q_prj"]), "lora.targets: no linear layer's path matches 'q_prj'; did you mean 'q_proj'?"),
    (dict(lora__targets=["layers.0.self_attn.q_proj"]), "lora.targets: no linear layer's path matches 'layers.0"),
    (dict(lora__dropout=1.0), "lora.dropout: 1.0 is not in [0, 1)"),
    (dict(train__freeze=["embed"]), "train.freeze: with lora.rank everything is frozen but the adapters; leave it out"),
    (dict(lora__init="svd"), "lora.init: 'svd' is not "),
    (dict(lora__init="pissa"), "lora.init: pissa begins with the principal components of trained weights, and the run"),
    (dict(lora__init="pissa", lora__dora=True), "lora.init: pissa is not for adapters with lora.dora; leave lora.dora"),
    (dict(lora__targets=[]), "lora.targets: [] is not a list of paths; give ['*'] for all linear layers"),
    (dict(lora__rank=-1), "lora.rank: -1 is negative; give 0 or more"),
    (dict(lora__quantize="int4"), "lora.quantize: 'int4' is not "),
    (dict(lora__quantize="nf4", train__trainable=["*norm*"]), "lora.quantize: train.trainable trains "),
    (dict(lora__quantize="int8", train__precision="fp8"), "lora.quantize: train.precision=fp8 rounds the weights"),
    (dict(lora__rank=0, lora__alpha=16.0, lora__quantize="nf4"), "lora.quantize: it is read with lora.rank above 0"),
])
def test_mistakes_are_told_in_one_line(keys, message):
    with pytest.raises(jt.UserError) as refusal:
        reference.build("llama", **(LORA | keys))
    assert f"{refusal.value}".startswith(message)
