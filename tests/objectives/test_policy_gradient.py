"""Policy gradients: loss, gradients and divergence of the plain formulas, on any mesh."""

import math

import jax
import numpy as np
import pytest

from jaxtrain import builder
from jaxtrain.sharding.mesh import AXES
from jaxtrain.train_step import partition
from tests.numerics import reference
from tests.numerics.plain_lora import at_random, merged
from tests.numerics.test_lora import initial
from tests.objectives import plain_policy_gradient as plain

KEYS = dict(reinforce__prompts="prompts.jsonl", reinforce__reward="reward.py:reward", reinforce__max_new_tokens=5,
            reinforce__kl=0.1)
CASES = {
    "fsdp x tensor, dapo": ("llama", dict(mesh=(1, 2, 2))),
    "one device, grpo": ("gpt2", dict(reinforce__loss="grpo", reinforce__clip_high=0.0)),
    "all axes, dr_grpo": ("gpt2", dict(mesh=(2, 2, 2), train__accumulation=2, optimizer__zero_stage=2,
                                       reinforce__loss="dr_grpo")),
    "ring, sequence ratios": ("llama", dict(mesh=(1, 2, 2), mesh__context=2, reinforce__ratio="sequence",
                                            reinforce__clip=0.05, reinforce__clip_high=0.07, reinforce__loss="grpo")),
    "1f1b, context": ("llama", dict(mesh=(1, 2, 1), mesh__stage=2, mesh__context=2, reinforce__ratio="sequence",
                                    reinforce__loss="grpo")),
    "zero-bubble, adapters": ("llama", dict(mesh=(1, 1, 2), mesh__stage=2, pipeline__schedule="zb_h1", lora__rank=3)),
    "experts, without a reference": ("mixtral", dict(mesh=(1, 2, 2), mesh__expert=2, optimizer__zero_stage=3,
                                                     reinforce__kl=0.0)),
}
QUICK = ("fsdp x tensor, dapo",)


def build(family, mesh=(1, 1, 1), **keys):
    """A run of the objective alone: the batches are the test's."""
    sizes = dict(zip(("mesh__data", "mesh__fsdp", "mesh__tensor"), mesh, strict=True))
    config = reference.tiny(family, **(sizes | keys))
    return builder.build(config, devices=jax.devices()[:math.prod(getattr(config.mesh, axis) for axis in AXES)])


@pytest.mark.parametrize("name", [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_loss_and_gradients_are_those_of_the_formula(name):
    family, keys = CASES[name]
    run = build(family, **(KEYS | keys))
    begun = at_random(initial(run))  # where the reference stays
    own = {key: value for key, value in begun.items() if key != "reference"}
    policy = jax.tree.map(lambda a: a * np.float32(1.1), partition.like(own, run.layout.axes))
    rest = partition.without(own, policy)
    params = partition.merge(policy, rest) | ({"reference": partition.like(own, policy)} if run.objective.reference
                                              else {})
    config, batch = run.config, plain.batch()

    def whole(trained):
        both = partition.merge(trained, rest)
        return merged(both, config.lora.alpha / config.lora.rank) if config.lora.rank else both

    def truth(trained):
        return plain.loss(config.reinforce, config.model, whole(trained), whole(partition.like(own, policy)), batch)

    (loss, kl), want = jax.jit(jax.value_and_grad(truth, has_aux=True))(policy)
    state, metrics = reference.compiled(run)(reference.start_from(run, params), run.place(batch))
    norm, o = float(reference.norm_of(want)), config.optimizer
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5, abs=1e-6)
    if config.reinforce.kl:
        assert float(metrics["kl"]) == pytest.approx(float(kl), rel=1e-4)
    assert 0.1 < float(metrics["clipped"]) < 0.9, "the case says nothing about clipping"
    assert float(metrics["reward"]) == pytest.approx(batch["rewards"].sum() / batch["answers"].sum(), rel=1e-5)
    assert float(metrics["answer_tokens"]) == pytest.approx(batch["weights"].sum() / batch["answers"].sum(), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    got = jax.tree.map(lambda m: np.asarray(m) / (1 - o.b1) / min(1, o.clip_norm / norm), reference.moments(state))
    error, leaf = reference.worst(got, jax.device_get(want), floor=1e-3 * norm)
    assert error < 2e-5, leaf
