"""Policy gradients: loss, gradients and divergence of the plain formulas, on any mesh."""

import math

import jax
import pytest

from jaxtrain import builder
from jaxtrain.sharding.mesh import AXES
from tests.numerics import reference
from tests.objectives import plain_policy_gradient as plain
from tests.objectives import tuned
from tests.tiers import slow_if

KEYS = dict(rl__prompts="prompts.jsonl", rl__reward="reward.py:reward", rl__max_new_tokens=5,
            rl__kl=0.1, data__global_batch_size=8)  # the formula goes from answer to answer
CRITIC = dict(rl__baseline="value", rl__value_loss=0.7)
CASES = {
    "fsdp x tensor, dapo": ("llama", dict(mesh=(1, 2, 2), rl__mask_truncated=True)),
    "one device, grpo": ("gpt2", dict(rl__loss="grpo", rl__clip_high=0.0, rl__temperature=0.7, rl__entropy=0.3)),
    "tensor x context, cispo": ("llama", dict(mesh=(1, 1, 2), mesh__context=2, rl__surrogate="cispo",
                                              rl__clip_high=0.05)),
    "all axes, dr_grpo": ("gpt2", dict(mesh=(2, 2, 2), train__accumulation=2, optimizer__zero_stage=2,
                                       rl__loss="dr_grpo")),
    "ring, sequence ratios": ("llama", dict(mesh=(1, 2, 2), mesh__context=2, mesh__context_strategy="ring",
                                            rl__ratio="sequence",
                                            rl__clip=0.05, rl__clip_high=0.07, rl__loss="grpo")),
    "truncated, accumulation": ("llama", dict(mesh=(1, 2, 2), train__accumulation=2, rl__loss="grpo",
                                              rl__correction="truncate", rl__correction_high=1.2)),
    "masked, sequence ratios": ("llama", dict(mesh=(1, 2, 1), mesh__context=2, rl__ratio="sequence",
                                              rl__correction="mask", rl__correction_low=0.85,
                                              rl__correction_high=1.15, rl__mask_truncated=True)),
    "masked, cispo": ("gpt2", dict(rl__surrogate="cispo", rl__correction="mask", rl__correction_low=0.7,
                                   rl__correction_high=1.4, rl__kl=0.0)),
    "1f1b, context": ("llama", dict(mesh=(1, 2, 1), mesh__stage=2, mesh__context=2, rl__ratio="sequence",
                                    rl__loss="grpo", rl__entropy=0.1)),
    "zero-bubble, adapters": ("llama", dict(mesh=(1, 1, 2), mesh__stage=2, pipeline__schedule="zb_h1", lora__rank=3)),
    "experts, without a reference": ("mixtral", dict(mesh=(1, 2, 2), mesh__expert=2, optimizer__zero_stage=3,
                                                     rl__kl=0.0, rl__entropy=0.1)),
    "critic, fsdp x tensor": ("llama", dict(mesh=(1, 2, 2), **CRITIC)),
    "critic, all axes, without clipping": ("gpt2", dict(mesh=(2, 2, 2), train__accumulation=2, optimizer__zero_stage=2,
                                                        rl__loss="dr_grpo", **(CRITIC | {
                                                            "rl__value_clip": 0.0}))),
    "critic, ring": ("llama", dict(mesh=(1, 2, 2), mesh__context=2, mesh__context_strategy="ring",
                                   rl__loss="grpo", **CRITIC)),
    "critic, 1f1b, context": ("llama", dict(mesh=(1, 2, 1), mesh__stage=2, mesh__context=2,
                                            rl__mask_truncated=True, **CRITIC)),
    "critic, zero-bubble, adapters": ("llama", dict(mesh=(1, 1, 2), mesh__stage=2, pipeline__schedule="zb_h1",
                                                    lora__rank=3, **CRITIC)),
    "critic, part of the layers": ("gpt2", dict(mesh=(1, 2, 1), train__trainable=["blocks/*attention*"], **CRITIC)),
    "critic, experts": ("mixtral", dict(mesh=(1, 2, 2), mesh__expert=2, rl__kl=0.0, **CRITIC)),
}
# The others have losses and meshes that are in these, too, with or without a critic; adapters are in test_lora.py.
SLOW = ("1f1b, context", "critic, all axes, without clipping", "truncated, accumulation", "masked, cispo")


def build(family, mesh=(1, 1, 1), **keys):
    """A run of the objective alone: the batches are the test's."""
    sizes = dict(zip(("mesh__data", "mesh__fsdp", "mesh__tensor"), mesh, strict=True))
    config = reference.tiny(family, **(sizes | keys))
    return builder.build(config, devices=jax.devices()[:math.prod(getattr(config.mesh, axis) for axis in AXES)])


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=slow_if(name in SLOW)) for name in CASES])
def test_loss_and_gradients_are_those_of_the_formula(name):
    family, keys = CASES[name]
    run = build(family, **(KEYS | keys))
    c = run.config
    batch = plain.batch(rows=8, values=c.rl.value_head)
    generated = batch["weights"].sum()
    if c.rl.mask_truncated:
        batch["weights"][batch["segments"] == 2] = 0
        assert 0 < batch["weights"].sum() < generated
    metrics, means = tuned.check(run, lambda policy, before: plain.loss(c.rl, c.model, policy, before, batch),
                              batch)
    if c.rl.kl:
        assert float(metrics["kl"]) == pytest.approx(float(means["kl"]), rel=1e-4)
    assert float(metrics["entropy"]) == pytest.approx(float(means["entropy"]), rel=1e-5)
    assert float(metrics["sampler_mismatch"]) == pytest.approx(float(means["gap"]), rel=1e-4)
    assert 1 <= float(metrics["sampler_mismatch_max"]) / float(means["most"]) < 2**(1 / 8) + 1e-4
    if c.rl.value_head:
        assert "value_head" in run.abstract.params and "value_head" not in run.abstract.frozen.get("reference", {})
        assert float(metrics["value_loss"]) == pytest.approx(float(means["value_loss"]), rel=1e-4)
        assert (0.1 < float(metrics["value_clipped"]) < 0.9) == (c.rl.value_clip > 0)
    assert 0.1 < float(metrics["clipped"]) < 0.9, "the case says nothing about clipping"
    assert float(metrics["reward"]) == pytest.approx(batch["rewards"].sum() / batch["answers"].sum(), rel=1e-5)
    assert float(metrics["answer_tokens"]) == pytest.approx(generated / batch["answers"].sum(), rel=1e-5)
