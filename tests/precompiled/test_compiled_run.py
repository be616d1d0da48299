"""A run that starts with compiled programs compiles nothing, and has the bits of a run that compiles."""

import json

import jax
import numpy as np
import pytest

from jaxtrain import train
from jaxtrain.checkpoint import fingerprint
from tests.tiny import devices

OF_ORBAX = {"jit(slice)"}  # a save in which several devices take part has programs of a slice each
NAMED = {"jit(_init)", "jit(step)", "jit(evaluation)", "jit(_sums)"}


def told(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key in ("step", "loss", "grad_norm", "eval_loss")}
            for line in lines]


@pytest.fixture(autouse=True)
def no_sums_of_other_tests(monkeypatch):
    monkeypatch.setattr(fingerprint, "_compiled", {})


@pytest.mark.parametrize("mesh", [(), pytest.param(("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
                                                   marks=pytest.mark.slow)])
def test_it_compiles_nothing_and_has_the_same_bits(made, tmp_path, compilations, monkeypatch, mesh, capfd):
    found = made(*mesh)
    with devices(8 if mesh else 1):
        compilations.clear()
        ours = train(found.config, tmp_path / "ours", compiled=found.folder)
        assert set(compilations) <= (OF_ORBAX if mesh else set())
        assert f"compiled programs from {found.folder}" in capfd.readouterr().err
        resumed = train(found.config, tmp_path / "ours", compiled=found.folder)  # what is restored is summed, too
        assert set(compilations) <= (OF_ORBAX if mesh else set())
        monkeypatch.setattr(fingerprint, "_compiled", {})
        compilations.clear()
        theirs = train(found.config, tmp_path / "theirs")
    assert set(compilations) >= NAMED
    assert told(tmp_path / "ours") == told(tmp_path / "theirs") and len(told(tmp_path / "ours")) == 6
    for state in (ours, resumed):
        for our, their in zip(jax.tree.leaves(state), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(np.asarray(our), np.asarray(their))
            assert our.sharding == their.sharding


def test_the_step_takes_the_memory_of_the_state_that_it_is_given(made):
    from jaxtrain.builder import build
    from jaxtrain.precompiled import compiled_run

    found = made()
    with devices(1):
        run = build(found.config)
        compiled_run.load(run, found.folder)
        state = run.init()
        run.step(state, run.batch(0))
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
