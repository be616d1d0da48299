"""Published layers that predict further tokens: logits, loss and gradients of transformers, and the same bytes back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config.family import config_of
from jaxtrain.hf.hf_config import config_json, model_section
from jaxtrain.hub.weights import published_weights
from jaxtrain.sharding import activations, mesh_context
from tests.hub import multi_token, published
from tests.hub.published_models import REPEATED, built, gradient_errors, loaded, other_bytes, value_and_grad
from tests.tiers import exhaustive, slow

KEYS = {"mtp_loss_weight": multi_token.LOSS_WEIGHT}
EXPERTS, STAGES, CONTEXT = ({"fsdp": 2, "expert": 2, "tensor": 2}, {"stage": 2, "fsdp": 2, "tensor": 2},
                            {"fsdp": 2, "context": 2, "tensor": 2})


def further_logits(run, params) -> list[np.ndarray]:
    """The logits of each layer that predicts a further token, where there is one."""
    layers = run.config.model.mtp_layers

    @jax.jit
    def computed(params):
        model, tokens = run.model.merge(params), activations.constrain(jnp.asarray(REPEATED), "batch", "seq")
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x, _ = model.through(model.begin(tokens, positions), None, positions)
        following = [jnp.roll(tokens, -n, 1) for n in range(1, layers + 1)]
        ahead = model.look_ahead(model.finish(x), following, None, positions)
        return [activations.constrain(model.logits(y), None, None, None) for y, _ in ahead]

    with mesh_context.use(run.mesh, run.sharded.rules):
        return [np.asarray(each)[:len(published.TOKENS), :-n] for n, each in enumerate(computed(params), 1)]


@pytest.mark.parametrize(("name", "mesh"), [
    *slow(("glm4_moe", STAGES), ("qwen3_5", {"fsdp": 4, "tensor": 2}), ("deepseek_v3", CONTEXT)),
    *exhaustive(("deepseek_v3", EXPERTS), ("glm4_moe", {}), ("qwen3_next", EXPERTS), ("qwen3_5", STAGES))])
def test_logits_loss_gradients_and_bytes(name, mesh, tmp_path):
    truth = multi_token.truth(name)
    run, params = loaded(multi_token.write(tmp_path / "in", name), KEYS, **mesh)
    if not {"stage", "context"} & mesh.keys():
        for found, wanted in zip(further_logits(run, params), truth["logits"], strict=True):
            wanted = np.asarray(wanted).reshape(found.shape)
            assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    loss, gradients = value_and_grad(run, params)
    assert abs(loss - truth["loss"]) < 1e-5 * truth["loss"]
    errors = gradient_errors(run, gradients, truth, tmp_path / "gradients")
    assert max(errors.values()) < 1e-4, max(errors, key=errors.get)
    assert not other_bytes(run, params, tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("name", multi_token.CASES)
def test_config_json_says_how_many_layers_are_written(name, tmp_path):
    section, key = model_section(multi_token.write(tmp_path, name)), multi_token.KEYS.get(name, multi_token.KEY)
    assert section.get("mtp_layers", 1) == multi_token.CASES[name]
    assert [config_json(config_of(section | more))[key] for more in (KEYS, {})] == [multi_token.CASES[name], 0]


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5"])
def test_they_are_left_out_unless_the_model_predicts_further_tokens(name, tmp_path):
    run, params = loaded(multi_token.write(tmp_path, name))
    assert "ahead" not in params and not run.config.model.multi_token_loss


@pytest.mark.parametrize(("without", "keys", "reason"), [
    ("layers.4.enorm", {}, "no tensor model.layers.4.enorm.weight; set model.mtp_loss_weight=0, or model.mtp_layers"),
    ("", {"mtp_layers": 3}, "it has no tensor model.layers.5."),
    ("", {"mtp_layers": 1}, "it has model.layers.4."),
])
def test_other_layers_than_the_files_have_are_refused_by_name(without, keys, reason, tmp_path):
    folder = multi_token.write(tmp_path, "deepseek_v3", without)
    run = built(folder, KEYS | keys)
    with pytest.raises(jt.UserError) as refusal:
        published_weights.load(folder, run.config.model, run.abstract.all_params)
    assert reason in f"{refusal.value}"


def test_embeddings_that_are_no_copies_are_refused_by_name(tmp_path):
    folder = published.write(tmp_path, multi_token.case("glm4_moe"))  # other numbers for each name
    run = built(folder, KEYS)
    with pytest.raises(jt.UserError, match=r"its model.layers.3.embed_tokens.weight is not model.embed_tokens.weight"):
        published_weights.load(folder, run.config.model, run.abstract.all_params)


@pytest.mark.parametrize("name", ["glm4_moe", "llama"])  # the latter has no published form of them
def test_layers_that_files_lack_begin_with_random_values(name, tmp_path, capsys):
    folder = published.write(tmp_path / "in", published.truth(name))
    run = jt.build(jt.load_config(f"hf:{folder}", {"model.mtp_loss_weight": 0.3, "mesh.data": 1}),
                   devices=jax.devices()[:1])
    params = run.init().params
    assert "has no layers for multi-token prediction: those of model.mtp_loss_weight begin" in capsys.readouterr().err
    assert float(jnp.std(params["ahead"]["this"]["kernel"])) == pytest.approx(0.02, rel=0.2)
    np.testing.assert_array_equal(params["embed"]["table"], published.weight("model.embed_tokens.weight", (24, 16)))
