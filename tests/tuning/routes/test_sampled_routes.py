"""Routes that a sampler took: those of a pass over the whole text, in batches, files and runs."""

import json

import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hub import decoding as decoding_module
from jaxtrain.hub.batching import told_routes
from jaxtrain.hub.decoding import decoding
from jaxtrain.models.experts.given_routes import ROUTES
from tests.numerics import reference
from tests.tiers import exhaustive, slow
from tests.tuning.exact.test_exact_answers import config
from tests.tuning.test_rollouts import files, on_four  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once


def run_of(files, family, **keys):  # noqa: F811
    return jt.build(config(files, family, **{"rl__exact": False, "rl__replay_routes": True} | keys))


@pytest.mark.parametrize(("family", "keys"), [
    *slow(("mixtral", dict(train__precision="float32", mesh__data=1, mesh__expert=2)),
          ("alternating", dict(train__precision="float32", mesh__tensor=1, mesh__fsdp=2)),
          ("kimi_linear", dict(train__precision="float32"))),
    *slow(("kimi_linear", dict(train__precision="float32", pages=True))),
    *exhaustive(("deepseek_v3", dict(train__precision="float32", mesh__data=1, mesh__stage=2)),
                ("mixtral", dict(train__precision="bfloat16")))])
def test_routes_are_those_of_a_pass_over_the_text(files, family, keys, monkeypatch):  # noqa: F811
    """In float32 the trainer's own, so that nothing changes; each token's, in each layer, where rows join and leave."""
    if (keys := dict(keys)).pop("pages", False):
        monkeypatch.setattr(decoding_module, "_layers_apart", lambda: False)  # as on accelerators
    run = run_of(files, family, **keys)
    state, c = run.init(), run.config.model
    run.see(0, state)
    batch = run.data[0]
    learnt, real = batch["weights"] > 0, batch["segments"] > 0
    routed = [n for n in range(c.num_layers) if n >= c.experts.dense_layers and (
        n - c.experts.dense_layers + 1) % c.experts.every == 0]
    routes = batch[ROUTES]
    assert routes.shape == (*real.shape, c.num_layers, c.experts.per_token) and learnt.any()
    assert (routes[real][:, routed] >= 0).all() and (routes[~real] == -1).all()
    assert (np.delete(routes, routed, 2) == -1).all()
    programs = decoding(run)
    width = real.shape[1]
    begins = width - real.sum(1)
    aligned = np.stack([np.roll(row, begin) for row, begin in zip(batch["tokens"], begins, strict=True)])
    # A pass over whole texts, at other times and in other rows than the sampler's.
    found = programs.prefill(state.all_params, aligned, begins, None, False)["entries"]
    whole = programs.routes(found, np.arange(len(aligned)))
    layers = told_routes.layers_of(found)
    assert layers == routed
    same = np.stack([told_routes.of_text(whole[:, row], layers, width, c.num_layers) for row in range(len(aligned))])
    agree = (same == routes)[real].mean()
    assert agree == 1 if keys["train__precision"] == "float32" else agree > 0.9

    plain = run_of(files, family, **keys | {"rl__replay_routes": False})
    without = {name: batch[name] for name in plain.objective.batch_spec}
    (loss, grads), (want, wanted) = run.value_and_grad(state, batch), plain.value_and_grad(state, without)
    if agree == 1:
        assert float(loss) == pytest.approx(float(want), abs=1e-6) and reference.worst(grads, wanted)[0] < 1e-5
    # They are read: others give another gradient.
    others = batch | {ROUTES: np.where(routes < 0, routes, (routes + 1) % c.experts.num)}
    assert reference.worst(run.value_and_grad(state, others)[1], grads)[0] > 0.01


@pytest.mark.slow
def test_a_run_goes_on_with_the_routes_of_its_files(files, tmp_path):  # noqa: F811
    keys = {"rl__exact": False, "rl__replay_routes": True, "rl__staleness": 1}
    jt.train(config(files, "mixtral", **keys), tmp_path / "whole")
    jt.train(config(files, "mixtral", **keys, train__steps=2), tmp_path / "parts")
    jt.train(config(files, "mixtral", **keys), tmp_path / "parts")
    lines = [[json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
             for name in ("whole", "parts")]
    norms = [[line["grad_norm"] for line in some if "loss" in line] for some in lines]
    assert norms[0] == norms[1] and len(norms[0]) == 4
    (tmp_path / "parts" / "rollouts" / "5.routes.npz").write_bytes(b"no archive")
    with pytest.raises(jt.UserError, match=r"rl: .*5.jsonl is not as the run wrote it \(its routes, 5.routes.npz"):
        jt.train(config(files, "mixtral", **keys, train__steps=6), tmp_path / "parts")
