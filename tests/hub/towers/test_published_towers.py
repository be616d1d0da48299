"""Published SigLIP and CLIP: embeddings, loss and gradients of transformers, and the same bytes back."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config.published_config import config_json, model_section, starting_config
from jaxtrain.config.published_towers import PREPROCESSOR, preprocessor
from jaxtrain.data.packing.picture_rows import PairedPictures
from jaxtrain.data.prepare_sequences.picture_patches import to_patches
from jaxtrain.hub.weights import published_weights, safetensors_files
from jaxtrain.train_step import partition
from tests.hub import published
from tests.hub.towers import tiny_towers as tiny

TRUTH = json.loads(Path(__file__).with_name("towers_truth.json").read_text())


def write(folder, name):
    return published.write(folder, {"config": TRUTH[name]["config"], "tensors": TRUTH[name]["shapes"]})


class Known(list):
    """Sequences in memory, as a prepared corpus has them."""

    columns = {"patches": SimpleNamespace(shape=(12,))}

    def counts(self, name="patches"):
        return np.array([len(one[name]) for one in self])


def rows(c, which, order=(0, 1, 2, 3)):
    """Two rows of two pictures each, and which pictures they hold."""
    found = Known()
    for picture, text in zip(tiny.PICTURES[which], tiny.TEXTS, strict=True):
        patches, places = to_patches(picture, 2)
        found.append({"patches": patches, "places": places, "target": np.array(text)})
    at = c.patches_per_side if c.class_token else None
    made = PairedPictures(found, 44, c.pictures_per_row, c.text_len, c.text_begin, c.text_end, c.text_pad, class_at=at)
    return {name: np.stack([made[i][name] for i in range(2)]) for name in made[0]}, sum(made.rows, [])


def built(folder, devices=1, **mesh):
    config = starting_config(f"{folder}")
    config["model"] |= {"pictures_per_row": 2, "max_seq_len": 48, "patches_per_side": 6}
    config = config | {"data": config["data"] | {"seq_len": 44, "global_batch_size": 2}, "mesh": mesh or {"data": 1}}
    return jt.build(jt.make_config(config), devices=jax.devices()[:devices])


@pytest.mark.parametrize(("name", "mesh"), [
    pytest.param("siglip", {}, marks=pytest.mark.slow), pytest.param("clip", {}, marks=pytest.mark.slow),
    pytest.param("clip_exact", {}, marks=pytest.mark.exhaustive),
    pytest.param("siglip", {"context": 2, "tensor": 2}, marks=pytest.mark.exhaustive),
    pytest.param("clip", {"fsdp": 2, "context": 2}, marks=pytest.mark.exhaustive)])
def test_embeddings_loss_gradients_and_bytes_are_those_of_transformers(name, mesh, tmp_path):
    truth, folder = TRUTH[name], write(tmp_path / "in", name)
    run = built(folder, 4 if mesh else 1, **mesh)
    params = published_weights.load(folder, run.config.model, run.abstract_model)
    (batch, order), (others, mixed) = (rows(run.config.model, which) for which in ("square", "others"))

    @jax.jit
    def both(params, batch):
        def loss(params):
            total, pairs, _ = run.objective.loss(params, batch)
            return total / pairs

        model = run.model.merge(partition.like(params, run.model.params()))
        return jax.value_and_grad(loss)(params), model(batch)

    from jaxtrain.sharding import rules as sharding
    with sharding.use(run.mesh, run.rules):
        (loss, gradients), (pictures, texts) = both(params, run.place(batch))
        seen = both(params, run.place(others))[1][0]
    for found, which, numbers in ((pictures, "pictures", order), (texts, "texts", order), (seen, "others", mixed)):
        wanted = np.reshape(truth[which], (4, -1))[numbers]
        assert np.abs(np.asarray(found).reshape(4, -1) - wanted).max() < 1e-5, which
    assert float(loss) == pytest.approx(truth["loss"], rel=1e-5)
    for made, tree in (("gradients", gradients), ("out", params)):
        (tmp_path / made).mkdir()
        published_weights.save(tree, run.config.model, tmp_path / made, np.float32, 10**9)
    found = safetensors_files.tensors_of(tmp_path / "gradients")
    assert found.keys() == truth["gradients"].keys()
    norm = np.linalg.norm([wanted[0] for wanted in truth["gradients"].values()])
    for name, wanted in truth["gradients"].items():
        error = np.abs(np.subtract(published.projections(name, found[name].view()), wanted)).max()
        assert error <= 1e-4 * max(wanted[0], 1e-4 * norm), name  # those of keys' biases are 0
    for key, tensor in safetensors_files.tensors_of(tmp_path / "out").items():
        assert tensor.view().tobytes() == safetensors_files.tensors_of(folder)[key].view().tobytes(), key
