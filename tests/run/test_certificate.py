"""A certificate counts for the parts, versions, layouts and precision that it is of, and a refutation stays."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.run import certificate
from tests.proof import own_module


def loss(params, batch, factor=1.0):
    return factor * jnp.square(batch["x"] @ params["w"]).mean()


def build(optimizer=None, *, factor=1.0, width=8, keys=None, **more):
    return jt.build(jt.make_config({}, keys or {}), **{
        "model": {"w": jnp.ones((8, width))}, "loss_fn": functools.partial(loss, factor=factor), "axes": {"w": None},
        "optimizer": optimizer or optax.adam(1e-2),
        "data": jt.BatchFunction(lambda step: {"x": np.ones((32, 8), np.float32)})} | more)


def test_other_optimizers_losses_and_shapes_have_other_hashes_and_other_meshes_the_same():
    runs = {"adam": build(), "rate": build(optax.adam(3e-2)), "sgd": build(optax.sgd(1.0)),
            "lion": build(optax.chain(optax.clip(1.0), optax.lion(1e-2))),
            "schedule": build(optax.adam(optax.linear_schedule(1e-2, 0.0, 50))),
            "loss": build(factor=2.0), "width": build(width=16)}
    assert len({certificate.hashes_of(run) for run in runs.values()}) == len(runs)
    same = build(keys={"mesh.data": 2, "mesh.fsdp": 4, "train.accumulation": 2})
    assert certificate.hashes_of(same) == certificate.hashes_of(runs["adam"])


def test_an_optimizer_with_collectives_has_one_hash_on_all_meshes():
    """It cannot be traced but for a mesh, whose sizes must not count."""
    hashes = {certificate.hashes_of(build(keys=keys, **own_module.parts() | {"optimizer": optimizer}))
              for keys in ({}, {"mesh.tensor": 2, "mesh.fsdp": 2})
              for optimizer in (own_module.optimizer(), optax.chain(own_module.optimizer(), optax.scale(2.0)))}
    assert len(hashes) == 2


@pytest.fixture
def written(tmp_path):
    """A function that writes a certificate of the run with a few keys changed, and returns what a run makes of it."""
    code, config = certificate.hashes_of(run := build())
    whole = {"code": code, "config": config, "proven": True, "worst": 0.2, "steps": 3, "precision": "float32",
             "versions": {name: certificate.version_of(name) for name in ("jax", "jaxlib")},
             "layouts": [{"layout": f"data=2 train.accumulation={n}"} for n in range(20)]}

    def write(**changes):
        (tmp_path / certificate.name_of(code, config)).write_text(json.dumps(whole | changes))
        return certificate.for_run(run, tmp_path)
    write.whole, write.folder = whole, tmp_path
    return write


@pytest.mark.parametrize(("changes", "words"), [
    ({"layouts": [{"layout": "data=2"}]}, "the certificate is of 1 layouts and 3 steps in float32, and at least 10 "
                                          "layouts and 2 steps in float32 are required; run jaxtrain prove again"),
    ({"steps": 1}, "of 20 layouts and 1 step in float32, and at least"),
    ({"precision": "bfloat16"}, "3 steps in bfloat16, and at least"),
    ({"versions": {"jax": "0.8.1", "jaxlib": "0.8.0"}}, "the certificate is of jax 0.8.1 and jaxlib 0.8.0, and this "
                                                        f"run has jax {certificate.version_of('jax')} and jaxlib"),
])
def test_a_weak_or_old_certificate_is_refused_in_one_sentence(written, changes, words):
    assert written()["proof"]["layouts"] == 20
    with pytest.raises(jt.UserError) as raised:
        written(**changes)
    assert f"{raised.value}".startswith("--require_proof: ") and words in f"{raised.value}"


def test_a_refutation_stays_until_its_layout_was_run_again(written):
    refuted = {"layout": "tensor=2", "keys": {"mesh.tensor": 2}, "step": 2}
    with pytest.raises(jt.UserError, match="were refuted"):
        written(proven=False, refuted=refuted)
    code, config = written.whole["code"], written.whole["config"]
    assert certificate.refuted(code, config, written.folder) == refuted
    with pytest.raises(jt.UserError, match=r"refuted on tensor=2, which could not be run again here; give as many"):
        certificate.write(written.whole, written.folder)
    again = written.whole | {"layouts": [{"layout": "tensor=2"}, {"layout": "data=2"}]}
    path = certificate.write(again, written.folder)
    assert json.loads(path.read_text())["proven"] and certificate.refuted(code, config, written.folder) == {}
