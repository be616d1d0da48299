"""Published SigLIP and CLIP: embeddings, loss and gradients of transformers, and the same bytes back."""

import json
import re
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import jax
import numpy as np
import pytest
import tokenizers

import jaxtrain as jt
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.config.family import config_class
from jaxtrain.data.packing.image_rows import PairedImages
from jaxtrain.data.prepare_sequences.image_patches import to_patches
from jaxtrain.data.tokenizers import tokenizer_folder
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.hf import dual_encoders
from jaxtrain.hf.dual_encoders import PREPROCESSOR, preprocessor
from jaxtrain.hf.encoder_tensors import image_encoder
from jaxtrain.hf.hf_config import config_json, model_section, starting_config
from jaxtrain.hub.initial_params import ENCODER
from jaxtrain.hub.release import exported_tokenizer
from jaxtrain.hub.weights import published_weights, safetensors_files
from jaxtrain.run import abstract_model
from jaxtrain.sharding import mesh_context
from jaxtrain.train_step import partition
from tests.hub import published
from tests.hub.towers import tiny_towers as tiny

TRUTH = json.loads(Path(__file__).with_name("towers_truth.json").read_text())


def write(folder, name):
    return published.write(folder, {"config": TRUTH[name]["config"], "tensors": TRUTH[name]["shapes"]})


class Known(list):
    """Sequences in memory, as a prepared corpus has them."""

    columns = MappingProxyType({"patches": SimpleNamespace(shape=(12,))})

    def counts(self, name="patches"):
        return np.array([len(one[name]) for one in self])


def rows(c, which):
    """Two rows of two images each, and which images they hold."""
    found = Known()
    for image, text in zip(tiny.IMAGES[which], tiny.TEXTS, strict=True):
        patches, places = to_patches(image, 2)
        found.append({"patches": patches, "places": places, "target": np.array(text)})
    at = c.patches_per_side if c.class_token else None
    made = PairedImages(found, 44, c.images_per_row, c.text_len, c.text_begin, c.text_end, c.text_pad, class_at=at)
    batch = {name: np.stack([made[i][name] for i in range(2)]) for name in made[0]}
    return batch, [number for row in made.rows for number in row]


def built(folder, devices=1, **mesh):
    config = starting_config(f"{folder}")
    config["model"] |= {"images_per_row": 2, "max_seq_len": 48, "patches_per_side": 6}
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
    params = published_weights.load(folder, run.config.model, abstract_model(run))
    (batch, order), (others, mixed) = (rows(run.config.model, which) for which in ("square", "others"))

    @jax.jit
    def both(params, batch):
        def loss(params):
            total, pairs, _ = run.objective.loss(params, batch)
            return total / pairs

        model = run.model.merge(partition.like(params, run.model.params()))
        return jax.value_and_grad(loss)(params), model(batch)

    with mesh_context.use(run.mesh, run.sharded.rules):
        (loss, gradients), (images, texts) = both(params, run.sharded.place(batch))
        seen = both(params, run.sharded.place(others))[1][0]
    for found, which, numbers in ((images, "images", order), (texts, "texts", order), (seen, "others", mixed)):
        wanted = np.reshape(truth[which], (4, -1))[numbers]
        assert np.abs(np.asarray(found)[:, :2].reshape(4, -1) - wanted).max() < 1e-5, which
    assert float(loss) == pytest.approx(truth["loss"], rel=1e-5)
    for made, tree in (("gradients", gradients), ("out", params)):
        (tmp_path / made).mkdir()
        published_weights.save(tree, run.config.model, tmp_path / made, np.float32, 10**9)
    found = safetensors_files.tensors_of(tmp_path / "gradients")
    assert found.keys() == truth["gradients"].keys()
    norm = np.linalg.norm([wanted[0] for wanted in truth["gradients"].values()])
    for name, wanted in truth["gradients"].items():
        error = np.abs(np.subtract(published.projections(name, found[name].view()), wanted)).max()
        assert error <= 1e-4 * max(wanted[0], 1e-3 * norm), name  # those of keys' biases are 0
    for key, tensor in safetensors_files.tensors_of(tmp_path / "out").items():
        assert tensor.view().tobytes() == safetensors_files.tensors_of(folder)[key].view().tobytes(), key


@pytest.mark.parametrize("name", TRUTH)
def test_configs_go_both_ways(name, tmp_path):
    """Pixels, tokens and sizes are included; an end of 2 is the last token of the vocabulary."""
    section = model_section(write(tmp_path / "in", name))
    kind, size = name.partition("_")[0], tiny.CONFIGS[name]["vision_config"]["image_size"]
    mean, std = tiny.mean_and_std(kind)
    tokens = {"text_end": 1, "text_pad": 1} if kind == "siglip" else {"text_begin": 22, "text_end": 23}
    expected = {"image_size": size, "pixel_mean": mean, "pixel_std": std, "patches_per_side": 4,
                "max_seq_len": 8 * (16 + (kind == "clip")), **tokens}
    assert {key: section[key] for key in expected} == expected
    model = config_class(kind)(**section)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.json").write_text(json.dumps(config_json(model)))
    (tmp_path / "out" / PREPROCESSOR).write_text(json.dumps(preprocessor(model)))
    assert model_section(tmp_path / "out") == section
    (tmp_path / "out" / PREPROCESSOR).write_text(json.dumps(preprocessor(model) | {"image_mean": [0.1, 0.2, 0.3]}))
    assert model_section(tmp_path / "out") == section | {"pixel_mean": [0.1, 0.2, 0.3]}
    (tmp_path / "out" / PREPROCESSOR).write_text(json.dumps(preprocessor(model) | {"resample": 2}))
    with pytest.warns(UserWarning, match=r"resample=2, and prepare_sequences images resizes bicubically \(3\)"):
        assert model_section(tmp_path / "out") == section
    (tmp_path / "out" / PREPROCESSOR).write_text(json.dumps(preprocessor(model) | {"image_mean": [0.1, 0.2, 0.3]}))
    both = {"image_processor": json.loads((tmp_path / "out" / PREPROCESSOR).read_text())}
    (tmp_path / "out" / PREPROCESSOR).rename(tmp_path / "out/processor_config.json").write_text(json.dumps(both))
    assert model_section(tmp_path / "out")["pixel_mean"] == [0.1, 0.2, 0.3]
    written, given = config_json(model), TRUTH[name]["config"]
    for half in ("text_config", "vision_config"):
        for key in written[half].keys() - {"bos_token_id", "eos_token_id"}:
            assert written[half][key] == given[half][key], key


@pytest.mark.parametrize(("name", "keys", "processor", "message"), [
    ("siglip", {"vision_config": {"vision_use_head": False}}, {}, "vision_config.vision_use_head=False cannot be expr"),
    ("siglip", {"vision_config": {"hidden_act": "relu"}}, {}, "vision_config.hidden_act='relu' cannot be expressed"),
    ("siglip", {"text_config": {"projection_size": 8}}, {}, "text_config.projection_size=8 is not the width 24 of ima"),
    ("siglip", {"text_config": {"num_hidden_layers": "2"}}, {}, "text_config.num_hidden_layers='2' is not a whole"),
    ("siglip", {"text_config": 3}, {}, "text_config=3 is not an object or null"),
    ("clip", {"text_config": {"eos_token_id": 24}}, {}, "text_config, end token=24 is not a token below vocab_size"),
    ("clip", {"vision_config": {"num_channels": 1}}, {}, "vision_config.num_channels=1 cannot be expressed: only 3"),
    ("clip", {}, {"do_normalize": False}, "do_normalize=False cannot be expressed: only True can"),
    ("clip", {}, {"rescale_factor": 1.0}, "rescale_factor=1.0 cannot be expressed: only 1/255 can"),
    ("clip", {}, {"crop_size": 16}, "it makes images of 16 pixels, and the model reads those of 8"),
    ("siglip", {}, {"image_mean": "half"}, "image_mean='half' is not a number for each channel"),
])
def test_what_cannot_be_expressed_is_refused(name, keys, processor, message, tmp_path):
    given = {key: value | keys.get(key, {}) if isinstance(value, dict) and isinstance(keys.get(key, {}), dict)
             else keys.get(key, value) for key, value in tiny.CONFIGS[name].items()}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name} | given))
    (tmp_path / PREPROCESSOR).write_text(json.dumps(processor))
    with pytest.raises(jt.UserError, match=re.escape(message)):
        model_section(tmp_path)


def test_tokens_that_fill_texts_up_are_named_as_they_are_read(tmp_path):
    """The tokens of an end and of padding may differ, which config.json cannot say."""
    model = config_class("siglip")(**model_section(write(tmp_path, "siglip")) | {"text_end": 3, "text_pad": 0})
    added = [{"id": number, "content": f"<{number}>", "special": True} for number in (0, 2, 3)]
    told = dual_encoders.named_fillers(model, {"added_tokens": added})
    assert (told["eos_token"], told["pad_token"], *told["added_tokens_decoder"]) == ("<3>", "<0>", "3", "0")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    again = model_section(tmp_path)
    assert (again["text_end"], again["text_pad"]) == (3, 0)


def test_a_tokenizer_goes_out_with_the_template_that_it_came_with(tmp_path):
    """The template puts a token behind a text, too."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1, "<bos>": 2, "cat": 3}))
    made.add_special_tokens(["<pad>", "<eos>", "<bos>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)])
    for folder in ("in", "work", "out"):
        (tmp_path / folder).mkdir()
    made.save(f"{tmp_path}/in/tokenizer.json")
    kept = load_tokenizer(f"{tmp_path}/in/tokenizer.json", "<eos>", "<bos>")
    tokenizer_folder.save(kept, tmp_path / "work/tokenizer")
    exported_tokenizer.write(tmp_path / "work", tmp_path / "out", None, {},
                             config_class("clip")(text_begin=2, text_end=1))
    assert tokenizers.Tokenizer.from_file(f"{tmp_path}/out/tokenizer.json").encode("cat").ids == [2, 3, 1]
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["pad_token"] == "<eos>"  # as CLIP's


def test_weights_that_lie_are_refused(tmp_path):
    case = {"config": TRUTH["clip"]["config"], "tensors": dict(TRUTH["clip"]["shapes"])}
    case["tensors"]["vision_model.embeddings.position_embedding.weight"] = [26, 24]
    case["tensors"]["text_model.embeddings.position_ids"] = [1, 6]  # a buffer, which old files have
    model = config_class("clip")(**model_section(published.write(tmp_path / "a", case)))
    abstract = {"image": {"grid": {"table": jax.ShapeDtypeStruct((17, 24), np.float32)}}}
    with pytest.raises(jt.UserError, match=r"position_embedding\.weight has the shape \[26, 24\] where the model n"):
        published_weights.load(tmp_path / "a", model, abstract)


def test_a_model_that_has_no_format_is_not_published():
    for keys, message in (({"pooling": "mean"}, "model.pooling: 'mean' cannot be published as siglip"),
                          ({"image_size": 0}, "model.image_size: without it positions are"),
                          ({"text_begin": 3}, "model.text_begin: 3 cannot be published as siglip")):
        section = dual_encoders.section("siglip", tiny.CONFIGS["siglip"], Path("config.json"))
        with pytest.raises(jt.UserError, match=re.escape(message)):
            config_json(config_class("siglip")(**section | keys))


@pytest.mark.parametrize("name", [pytest.param("siglip", marks=pytest.mark.slow),
                                  pytest.param("clip", marks=pytest.mark.exhaustive)])
def test_a_decoder_begins_with_a_published_encoder_and_a_published_decoder(name, tmp_path):
    folder, llama = write(tmp_path / "in", name), published.write(tmp_path / "llama", published.truth("llama"))
    section = model_section(folder)
    model = model_section(llama) | {key: section[key] for key in ENCODER} | {"name": "vision_language"}
    train = {"init_from": str(llama), "init_encoder_from": str(folder), "freeze": ["image/*"]}
    sections = {"model": model, "data": {"seq_len": 16, "global_batch_size": 1, "packing": "best_fit"},
                "mesh": {"data": 1}, "train": train}
    run = jt.build(jt.make_config(sections), devices=jax.devices()[:1])
    state = run.init()
    for entry in image_encoder(run.config.model):
        shape = flatten(state.frozen)[entry.ours].shape
        for tensor, which in published_weights.names(entry, shape):
            found = published_weights.published([(entry, which)], flatten(state.frozen), np.float32, 0.0)
            assert np.array_equal(found, published.weight(tensor, tuple(TRUTH[name]["shapes"][tensor]))), tensor
    assert np.array_equal(state.params["embed"]["table"], published.weight("model.embed_tokens.weight", (24, 16)))
    assert state.params["connector"]["up"]["kernel"].std() > 0
    sections["model"]["gelu"] = "tanh" if name == "clip" else "quick"
    wrong = jt.build(jt.make_config(sections), devices=jax.devices()[:1])
    with pytest.raises(jt.UserError, match=rf"has other keys than the model; set model.gelu={section['gelu']}"):
        wrong.init()
    sections["train"] = {"init_from": str(folder)}
    with pytest.raises(jt.UserError, match=r"has no decoder; give its folder as train\.init_encoder_from"):
        jt.build(jt.make_config(sections), devices=jax.devices()[:1]).init()
