"""A run with a larger vocabulary than the model that it begins with."""

import json

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hf.hf_config import model_section
from tests.hub import published

ROWS = 24  # of the published vocabulary


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return published.write(tmp_path_factory.mktemp("published") / "in", published.truth("llama"))


def begun(source, model, vocab_size: int, **keys):
    """The parameters of step 0 where an axis splits the vocabulary."""
    config = jt.make_config({"model": model | {"vocab_size": vocab_size}, "data": {"seq_len": 8},
                             "mesh": {"data": 1, "fsdp": 2, "tensor": 2}, "train": {"init_from": str(source)}}, keys)
    return jt.build(config, devices=jax.devices()[:4]).init()


def test_new_tokens_begin_as_the_mean_of_the_others(folder, capsys):
    model = model_section(folder)
    known, more = (begun(folder, model, size).params for size in (ROWS, ROWS + 4))
    assert "4 new tokens begin as the mean of the others" in capsys.readouterr().err
    for path, dim in ((("embed", "table"), 0), (("output", "kernel"), 1)):
        old, new = (np.moveaxis(jax.device_get(tree[path[0]][path[1]]), dim, 0) for tree in (known, more))
        np.testing.assert_array_equal(new[:ROWS], old)
        np.testing.assert_allclose(new[ROWS:], np.tile(old.mean(0), (4, 1)), rtol=1e-5, atol=1e-7)
        assert new.shape[0] == ROWS + 4 and more[path[0]][path[1]].sharding.spec[dim] is not None
    jax.tree.map(np.testing.assert_array_equal, known["blocks"], more["blocks"])


def test_tables_of_inputs_of_layers_grow_with_the_vocabulary(tmp_path):
    """Gemma 4's inputs of layers have a table of their own, with as many rows as the vocabulary or more."""
    folder = published.write(tmp_path / "in", published.truth("gemma4_inputs"))
    model = model_section(folder)
    assert model["per_layer_vocab"] == ROWS
    known, more = (begun(folder, model | {"per_layer_vocab": size}, size).params for size in (ROWS, ROWS + 4))
    old, new = (jax.device_get(tree["inputs"]["embed"]["table"]) for tree in (known, more))
    np.testing.assert_array_equal(new[:ROWS], old)
    np.testing.assert_allclose(new[ROWS:], np.tile(old.mean(0), (4, 1)), rtol=1e-5, atol=1e-7)
    assert more["embed"]["table"].shape[0] == new.shape[0] == ROWS + 4
    with pytest.raises(jt.UserError, match=r"^model.per_layer_vocab: 24 is less than model.vocab_size=28"):
        begun(folder, model, ROWS + 4)


@pytest.mark.slow
def test_a_table_of_inputs_of_layers_that_is_large_enough_stays(tmp_path):
    folder = published.write(tmp_path / "small", published.truth("gemma4_small"))
    model = model_section(folder)
    assert model["per_layer_vocab"] == ROWS + 4
    grown = begun(folder, model, ROWS + 2, **{"mesh.tensor": 1, "mesh.data": 2}).params
    assert grown["embed"]["table"].shape[0] == ROWS + 2 and grown["inputs"]["embed"]["table"].shape[0] == ROWS + 4
    with pytest.raises(jt.UserError, match=r"^model.per_layer_vocab: 26 is less than the 28 of the model in train"):
        begun(folder, model | {"per_layer_vocab": ROWS + 2}, ROWS + 2)


@pytest.mark.exhaustive
def test_a_run_of_ones_own_begins_with_more_tokens_too(folder, tmp_path):
    """The same holds with frozen parameters in few bits, and with a vocabulary that would not divide over the mesh."""
    (tmp_path / "text.txt").write_text("It was the best of times.\n" * 50)
    model = model_section(folder) | {"vocab_size": 261}
    keys = {"data.source": str(tmp_path / "text.txt"), "data.seq_len": 8, "data.global_batch_size": 8,
            "train.steps": 1, "train.eval_every": 0, "train.progress": False, "mesh.data": 8}
    state = jt.train(jt.make_config({"model": model}, keys), tmp_path / "work")
    more = begun(tmp_path / "work", model, 264)
    np.testing.assert_array_equal(jax.device_get(more.params["embed"]["table"])[:261], state.params["embed"]["table"])
    few = begun(tmp_path / "work", model, 264, **{"lora.rank": 2, "lora.quantize": "int8"}).all_params
    np.testing.assert_array_equal(few["embed"]["table"], more.params["embed"]["table"])
    assert json.loads((tmp_path / "work" / "config.json").read_text())["model"]["vocab_size"] == 261
    with pytest.raises(jt.UserError, match="vocab_size"):
        begun(folder, model, 261)


def test_what_does_not_fit_is_refused_and_leaves_the_workdir_free(folder, tmp_path):
    (tmp_path / "text.txt").write_text("It was the best of times.\n" * 50)
    config = jt.make_config({"model": model_section(folder) | {"vocab_size": 257, "num_layers": 1}}, {
        "data.source": str(tmp_path / "text.txt"), "data.seq_len": 8, "train.init_from": str(folder)})
    with pytest.raises(jt.UserError, match="input_layernorm"):
        jt.train(config, tmp_path / "work")
    assert not {"config.json", "run.json", "tokenizer"} & {path.name for path in (tmp_path / "work").iterdir()}
    (tmp_path / "work" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(jt.UserError):
        jt.train(config, tmp_path / "work")
    assert (tmp_path / "work" / "config.json").exists()


def test_fewer_tokens_are_refused(folder):
    with pytest.raises(jt.UserError, match=r"^model.vocab_size: 20 is less than the 24 of the model in train"):
        begun(folder, model_section(folder), 20)
