"""Loss and gradients with routes that a batch brings are those of plain layers that go the same ways."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.models.experts.given_routes import ROUTES
from tests.numerics import plain_experts
from tests.objectives import plain_policy_gradient as plain
from tests.objectives import tuned
from tests.objectives.test_policy_gradient import KEYS, build
from tests.tiers import exhaustive, slow

CASES = {
    "one device": ("mixtral", dict()),
    "experts, fsdp, tensor": ("mixtral", dict(mesh=(1, 2, 2), mesh__expert=2, train__remat="full")),
    "stages, accumulation, a dense layer first": ("qwen3_moe", dict(
        mesh=(1, 2, 1), mesh__stage=2, model__num_layers=3, model__capacity_factor=0.0)),
    "ring, groups of experts": ("deepseek_v3", dict(mesh=(1, 1, 2), mesh__context=2, train__accumulation=2,
                                                   model__router_bias_rate=0.0)),
    "layers in groups": ("alternating", dict(mesh=(1, 2, 1), mesh__context=2, model__router_bias_rate=0.0)),
}


def with_routes(run, made):
    """The batch with routes that no router would take, of most tokens; the others have their router's."""
    c, (rows, length) = run.config.model, made["tokens"].shape
    rng = np.random.default_rng(7)
    routes = rng.random((rows, length, c.num_layers, c.experts.num)).argsort(-1)[..., :c.experts.per_token]
    routes[rng.random((rows, length)) < 0.2] = -1
    return made | {ROUTES: routes.astype(np.int16)}


@pytest.mark.parametrize("name", [*slow("experts, fsdp, tensor", "layers in groups"), *exhaustive(
    "one device", "stages, accumulation, a dense layer first", "ring, groups of experts")])
def test_loss_and_gradients_are_those_of_plain_layers(name, monkeypatch):
    family, keys = CASES[name]
    run = build(family, **KEYS | {"rl__kl": 0.0, "rl__replay_routes": True} | keys)
    c, batch = run.config, with_routes(run, plain.batch(rows=8))
    e, choice = c.model.experts, plain_experts.choice
    routed = [n for n in range(c.model.num_layers) if n >= e.dense_layers and (n - e.dense_layers + 1) % e.every == 0]
    ways = itertools.cycle(routed)

    def given(c, router, h, segments):
        """The result of `choice`, with the routes of the batch for the layer whose turn it is."""
        logits, scores, _, hit = choice(c, router, h, segments)
        routes = batch[ROUTES][:, :, next(ways)].astype(int)
        given = (routes[..., None] == np.arange(c.experts.num)).any(-2)
        hit = jnp.where(routes[..., :1] >= 0, given & (segments > 0)[..., None], hit)
        weights = jnp.where(hit, scores, 0)
        if c.experts.normalized:
            weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-20)
        return logits, scores, c.experts.scale * weights, hit

    monkeypatch.setattr(plain_experts, "choice", given)
    tuned.check(run, lambda policy, before: plain.loss(c.rl, c.model, policy, before, batch), batch)
    assert next(ways) == routed[0]


@pytest.mark.parametrize(("family", "keys", "sentence"), [
    ("llama", {}, "rl.replay_routes: llama has no experts; leave it out"),
    ("mixtral", {"rl__exact": True}, "rl.replay_routes: with rl.exact the step takes its own routes"),
    ("mixtral", {"model__capacity_factor": 1.5}, "rl.replay_routes: experts drop tokens by model.capacity_factor=1.5")])
def test_what_cannot_be_replayed_is_refused(family, keys, sentence):
    with pytest.raises(jt.UserError, match=sentence):
        build(family, **KEYS | {"rl__replay_routes": True} | keys)
