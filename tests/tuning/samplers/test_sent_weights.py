"""Weights for a sampler: what has changed since what it has, and everything where it may have something else."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hub.weights import published_weights, safetensors_files
from jaxtrain.train_step import partition
from jaxtrain.tuning.samplers.sent_weights import SentWeights, files_of
from jaxtrain.tuning.samplers.served_model import ServedModel
from tests.numerics import reference
from tests.tiny import devices
from tests.tuning.samplers.test_sampler_server import ASKED, TINY

pytestmark = pytest.mark.usefixtures("cache")
PART = {"train__trainable": ("*/mlp/*",)}
# Which are sent as parts of matrices.
ADAPTERS = {"lora__rank": 2, "lora__dora": True, "lora__targets": ("q_proj", "v_proj")}


def runs_of(family="llama", **keys):
    """A run, its state at the beginning and after a change of all that it trains, as a step makes it."""
    run = jt.build(reference.tiny(family, **(TINY | keys)))
    state = run.init()
    return run, state, moved(state)


def moved(state):
    return replace(state, params=jax.tree.map(lambda x: x + 0.05, state.params))


def tensors_in(folder):
    return {name: tensor.view().tobytes() for name, tensor in safetensors_files.tensors_of(folder).items()}


def whole(run, state, folder):
    """The tensors of a folder that is written at once."""
    folder.mkdir()
    params = partition.without(state.all_params, run.objective.frozen_axes)
    published_weights.save(params, run.config.model, folder, np.dtype(np.float32), 10**9, run.config.lora)
    return tensors_in(folder)


@pytest.mark.parametrize(("family", "keys"), [
    ("llama", PART), ("llama", ADAPTERS), ("llama", {}), ("mixtral", {"lora__rank": 2, "lora__experts": True})],
    ids=["part", "dora", "all", "experts"])
def test_tensors_that_are_not_trained_are_written_once(family, keys, tmp_path):
    with devices(1):
        run, begun, later = runs_of(family, **keys)
        sent = SentWeights(run, tmp_path / "sampler")
        first = sent.written(0, begun)
        everything = sent.written_bytes
        second = sent.written(1, later)
        changed = sent.written_bytes
        want = [whole(run, state, tmp_path / f"{n}") for n, state in enumerate((begun, later))]
    assert [tensors_in(one.folder) for one in (first, second)] == want
    differ = sum(len(tensor) for name, tensor in want[1].items() if tensor != want[0][name])
    assert differ <= changed < differ + 20_000  # headers, and the index
    assert changed == everything if not keys else changed < 0.9 * everything
    if keys:
        linked = [name for name in files_of(second.folder) if name.startswith("frozen")]
        assert linked and all((second.folder / name).samefile(first.folder / name) for name in linked)
    shutil.rmtree(first.folder)  # the second is whole without it
    assert tensors_in(second.folder) == want[1]


def test_everything_is_written_again_where_steps_begin_elsewhere(tmp_path):
    with devices(1):
        run, begun, later = runs_of(**PART)
        sent = SentWeights(run, tmp_path)
        first = sent.written(0, begun)
        everything = sent.written_bytes
        sent.forget()  # as a rollback does
        sent.written(2, later)
        assert sent.written_bytes == everything
        sent.written(3, begun)
        assert sent.written_bytes < everything
        for name in files_of(sent.kept(3).folder):  # somebody has made room
            (sent.kept(3).folder / name).unlink()
        sent.written(4, later)
        assert sent.written_bytes == everything
        again = SentWeights(run, tmp_path)  # a run that goes on
        assert again.kept(0) == first
        again.written(5, later)
        assert again.written_bytes == everything


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A published model, and the runs that it begins."""
    with devices(1):
        run = jt.build(reference.tiny("llama", **TINY))
        yield run, run.init()


def answers_of(served):
    return [served.completion(ASKED | {"seed": seed})["choices"][0] for seed in range(3)]


def test_a_sampler_reads_what_has_changed_and_answers_as_one_that_reads_everything(base, tmp_path, monkeypatch):
    with devices(1):
        run, begun, later = runs_of(**PART)
        read, placed = [], published_weights.placed
        monkeypatch.setattr(published_weights, "placed", lambda leaf, reader: (
            read.append(leaf), placed(leaf, reader))[1])
        sent = SentWeights(run, tmp_path)
        folders = [sent.written(n, state).folder for n, state in enumerate((begun, later))]
        sent.forget()
        folders.append(sent.written(2, begun).folder)
        many, trained = len(jax.tree.leaves(begun.all_params)), len(jax.tree.leaves(begun.params))
        served = ServedModel(*base, "tiny")
        found = []
        for folder, count in zip(folders, (many, trained, trained), strict=True):
            read.clear()
            served.reload(folder)
            assert len(read) == count < 20
            found.append(answers_of(served))
        killed = ServedModel(*base, "tiny")  # and started again
        for folder, want in [*zip(folders, found, strict=True)][1:]:
            read.clear()
            killed.reload(folder)
            assert answers_of(killed) == want
        assert found[0] == found[2] != found[1]
        with pytest.raises(jt.UserError):
            killed.reload(tmp_path)
        assert answers_of(killed) == found[2]
        for one in (served, killed):
            one.close()
