"""Models of images: loss and gradients of one image at a time on one device, on any mesh; and runs that go on."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.data.loading.modalities.image_batches import image_batches
from jaxtrain.objectives.flow_matching import noise, sample
from jaxtrain.run import shapes_of
from tests.data.prepare_sequences.drawn_images import folder_of
from tests.numerics import reference
from tests.objectives import plain_vision as plain
from tests.objectives.tuned import lines_of_same_bits
from tests.tiers import slow_if


def built(kind, devices=None, data=None, model=None, **keys):
    return jt.build(plain.config(kind, data, model, **keys), devices=jax.devices()[:devices or 1])


DUAL = ("siglip", "clip")


@pytest.fixture(scope="module")
def truth():
    """Parameters that are not as at first, and loss, accuracy of pairs and gradients of the formula, of a family."""
    known = {}

    def of(kind):
        if kind not in known:
            run, rng = built(kind, 1), np.random.default_rng(0)
            params = jax.tree.map(lambda a: (a + rng.normal(size=a.shape, scale=0.1)).astype(np.float32),
                                  jax.device_get(run._jitted_init(0).params))
            batch = plain.batch(kind)
            formula = plain.contrastive if kind.startswith(DUAL) else lambda *args: (plain.loss(*args), None)
            both = jax.jit(jax.value_and_grad(lambda p: formula(run.config.model, p, batch), has_aux=True))
            known[kind] = params, batch, *both.lower(params).compile({"xla_backend_optimization_level": 0})(params)
        return known[kind]
    return of


CASES = {
    "siglip": [dict(mesh__data=2, mesh__stage=2, mesh__tensor=2), dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2),
               dict(mesh__fsdp=2, mesh__context=4), {}],
    "clip": [dict(mesh__fsdp=2, mesh__context=2, mesh__tensor=2), dict(mesh__data=8),
             dict(mesh__fsdp=2, mesh__stage=2, mesh__context=2)],
    "vision_language": [dict(mesh__stage=2, mesh__context=2, mesh__tensor=2), dict(mesh__fsdp=2, mesh__tensor=4),
                        dict(mesh__fsdp=4, mesh__context=2), dict(mesh__fsdp=2, optimizer__offload=True)],
    "image_flow": [dict(mesh__data=2, mesh__context=2, mesh__tensor=2), dict(mesh__fsdp=8),
                   dict(mesh__stage=2, mesh__context=2, mesh__tensor=2)],
    "siglip published": [dict(mesh__fsdp=2, mesh__context=2, mesh__tensor=2)],
    "clip published": [dict(mesh__data=2, mesh__context=2, mesh__tensor=2)],
    "vision_language published": [dict(mesh__data=2, mesh__stage=2, mesh__context=2)],
}
# What they have of their own is little. Siglip's stages and micro-batches are in test_fuzz_modalities.py.
EXHAUSTIVE = ("siglip", "clip", "clip published", "vision_language published")


@pytest.mark.parametrize(("kind", "mesh"), [
    pytest.param(kind, mesh, marks=slow_if((number == 0 or "optimizer__offload" in mesh) and kind not in EXHAUSTIVE),
                 id=" ".join([kind, *(f"{key.partition('__')[2]}={size}" for key, size in mesh.items())]))
    for kind, meshes in CASES.items() for number, mesh in enumerate(meshes)])
def test_loss_and_gradients_are_those_of_one_image_at_a_time(kind, mesh, truth):
    params, batch, (loss, accuracy), want = truth(kind)
    run = built(kind, int(np.prod(list(mesh.values()) or [1])), **mesh)
    state = reference.start_from(run, params)
    if kind.startswith(DUAL):
        sums = run.sharded.compiled_evaluation(shapes_of(run).abstract())(state.all_params, run.sharded.place(batch))[2]
        assert float(sums["accuracy"] / sums["weight"]) == pytest.approx(float(accuracy))
    state, metrics = reference.compiled(run)(state, run.sharded.place(batch))
    norm, o = float(reference.norm_of(want)), run.config.optimizer
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    got = jax.tree.map(lambda m: np.asarray(m) / (1 - o.b1) / min(1, o.clip_norm / norm), reference.moments(state))
    error, leaf = reference.worst(got, jax.device_get(want), floor=1e-3 * norm)
    assert error < 2e-5, leaf


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return {target: folder_of(tmp_path_factory.mktemp(target), target) for target in ("text", "folder")}


@pytest.mark.parametrize("kind", [pytest.param("siglip", marks=pytest.mark.slow), *(
    pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("vision_language", "image_flow"))])
def test_a_run_learns_from_images_and_goes_on(kind, corpora, tmp_path):
    folder = corpora["folder" if kind == "image_flow" else "text"]
    model = {} if kind == "image_flow" else dict(vocab_size=264)
    data = dict(source=str(folder), seq_len=48, global_batch_size=4, augment=["flip", "colour"])
    model |= dict(text_len=16) if kind == "siglip" else {}
    keys = dict(mesh__data=2, checkpoint__every=4, optimizer__learning_rate=3e-3,
                train__progress=False, model__max_seq_len=48)
    lines = lines_of_same_bits(built(kind, 2, data, model, **keys), tmp_path, last=8)
    assert lines[-2]["loss"] < lines[0]["loss"]
    assert lines[-1].keys() == {"step", "eval_loss"} | ({"eval_accuracy"} if kind == "siglip" else set())


def test_images_are_made_by_eulers_method():
    """A velocity that leads straight to an image ends there; others are summed up at the beginnings of steps."""
    def field(velocity):
        embed = SimpleNamespace(kernel=np.zeros((12, 4), np.float32))
        parts = {"image": SimpleNamespace(embed=embed), "__call__": lambda self, *args: velocity(*args)}
        return type("Field", (), parts)()

    def wanted(places, labels):
        return (100 * labels + 10 * places[..., 0] + places[..., 1])[..., None] / 127.5 - 1

    def straight(x, images, places, times, labels):
        assert images.shape == x.shape[:2] and times.shape == labels.shape == (2, 1)
        return (wanted(places, labels) - x) / (1 - times[..., None])

    found = sample(field(straight), [1, 2], rows=3, columns=2, steps=4)
    assert found.shape == (2, 6, 12) and found.dtype == np.uint8
    assert np.array_equal(found[:, :, 0], 100 * np.array([[1], [2]]) + np.array([0, 1, 10, 11, 20, 21]))
    draws = np.random.Generator(np.random.Philox(5)).integers(0, 2**32, (2, 6), np.uint32)
    start = np.asarray(noise(jnp.asarray(draws), 12))
    risen = sample(field(lambda x, images, places, times, labels: 0.5 * times[..., None] + 0 * x), [0, 0], 3, 2,
                   steps=4, seed=5)
    summed = start + 0.5 * (0 + 0.25 + 0.5 + 0.75) / 4
    assert np.abs(risen - np.clip((summed + 1) * 127.5, 0, 255)).max() < 0.51


@pytest.mark.parametrize(("kind", "keys", "message"), [
    ("siglip", dict(data__packing="bucket"), "data.packing: siglip has whole images in a row; set data.packing=best"),
    ("siglip", dict(model__image_heads=7), "model.image_heads: 7 does not divide model.image_embed_dim=40; ch"),
    ("siglip", dict(mesh__tensor=8), "model.text_len: the 12 places for 3 texts of a row in 8 parts: that does not"),
    ("clip", dict(mesh__context=4), "model.text_len: the 12 places for 3 texts of a row in 8 parts: that does not"),
    ("clip", dict(model__mup_base={"embed_dim": 16, "num_heads": 4}), "model.mup_base: clip has an image enco"),
    ("vision_language", dict(model__mtp_loss_weight=0.1), "model.mtp_loss_weight: it is not supported with images"),
    ("image_flow", dict(data__augment=["blur"]), "data.augment: 'blur' is not supported; known: colour, crop"),
    ("clip", dict(compression__method="int8"), "compression.method: clip compares pairs over the whole batch"),
    ("image_flow", dict(train__z_loss=1e-3), "train.z_loss: image_flow has no cross-entropy per token; leave it o"),
    ("vision_language", dict(evaluation__tasks=["a"]), "evaluation.tasks: it is for decoders of text, and vision_l"),
    ("siglip", dict(model__class_token=True), "model.class_token: it is read with model.image_size only; set that"),
    ("clip", dict(model__pooling="class"), "model.pooling: 'class' does not go with model.class_token=False; set po"),
    ("siglip", dict(model__projections="text"), "model.joint_dim: 24 differs from model.image_embed_dim=40, and mo"),
    ("siglip", dict(model__image_size=1), "model.image_size: 1 has no whole patch of 2 pixels; give the side of"),
    ("clip", dict(model__pixel_std=[1.0, 0.0, 1.0]), "model.pixel_std: [1.0, 0.0, 1.0] does not have a positive numb"),
    ("clip", dict(model__text_end=64), "model.text_end: 64 is not a token below model.vocab_size=64; give an id of"),
    ("image_flow", dict(train__init_encoder_from="a"), "train.init_encoder_from: it is read with vision_language on"),
    ("siglip", dict(mesh__stage=2, pipeline__schedule="interleaved", pipeline__chunks=4, model__image_layers=3),
     "pipeline.chunks: 4 chunks on a stage are more than there are layers; use 3 or fewer"),
    ("image_flow", dict(lora__rank=2), "lora.rank: it is for decoders of text, and image_flow is not one; leave"),
])
def test_mistakes_are_told_in_one_line(kind, keys, message):
    with pytest.raises(jt.UserError) as refusal:
        built(kind, int(np.prod([size for key, size in keys.items() if key.startswith("mesh__")])), **keys)
    assert f"{refusal.value}".startswith(message)


def test_a_corpus_without_images_or_with_other_patches_is_refused():
    config, train = built("siglip", 1).config, SimpleNamespace(columns=("features", "target"))
    for manifest, message in (({}, "data.source: siglip reads images, and it has features, target; name one that"),
                              ({"patch_size": 4}, "model.patch_size: it is 2, and data.source has patches of 4")):
        with pytest.raises(jt.UserError) as refusal:
            image_batches(config.model, config.data, SimpleNamespace(manifest=manifest, train=train), "train")
        assert f"{refusal.value}".startswith(message)
