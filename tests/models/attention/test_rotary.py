"""Rotary positions: each way of scaling by its published formula and by Transformers' numbers, and the rotation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.models.attention.rotary import Rotary, frequencies, scaled_frequencies, score_factor
from jaxtrain.models.deepseek_v3 import DeepseekV3Config
from jaxtrain.models.llama import LlamaConfig
from tests.numerics import plain_rotary, reference
from tests.tiers import slow_if

B, T, K = 2, 12, 8
YARN = dict(rope_type="yarn", rope_scaling=4.0, rope_original_len=32, rope_theta=100.0, rope_beta_fast=6.0)
SCALINGS = {
    "none": dict(rope_theta=500.0),
    "linear": dict(rope_type="linear", rope_scaling=4.0),
    "ntk": dict(rope_type="ntk", rope_scaling=4.0),
    "llama31": dict(rope_scaling=8.0, rope_theta=500_000.0),
    "llama32": dict(rope_scaling=32.0, rope_theta=500_000.0),
    "llama3_factors": dict(rope_scaling=16.0, rope_theta=500_000.0, rope_original_len=4096, rope_low_freq_factor=0.5,
                           rope_high_freq_factor=50.0),
    "yarn": dict(rope_type="yarn", rope_scaling=4.0, rope_original_len=2048),
    "yarn_betas": dict(rope_type="yarn", rope_scaling=4.0, rope_original_len=32768, rope_theta=1e6,
                       rope_beta_fast=64.0, rope_beta_slow=2.0),
    "yarn_not_rounded": dict(rope_type="yarn", rope_scaling=32.0, rope_original_len=4096, rope_theta=150_000.0,
                             rope_truncate=False),
    "yarn_mscale": dict(rope_type="yarn", rope_scaling=40.0, rope_original_len=4096, rope_mscale=0.707,
                        rope_mscale_all_dim=1.0),
    "yarn_factor": dict(rope_type="yarn", rope_scaling=40.0, rope_original_len=4096, rope_attention_factor=1.25),
}
# The frequencies of a width of 16 and the factor of cosine and sine, by ROPE_INIT_FUNCTIONS of Transformers 5.24.0
# (with PyTorch 2.14.1, in float32): "linear", "dynamic" (of factor 1, at four times the original length), "llama3"
# and "yarn".
TRANSFORMERS = {
    "linear": ([0.25, 0.079056941, 0.0250000004, 0.00790569466, 0.00249999994, 0.000790569466, 0.000250000012,
                7.90569466e-05], 1.0),
    "ntk": ([1, 0.259412825, 0.0672950074, 0.017457189, 0.00452861842, 0.00117478159, 0.000304753397, 7.90569466e-05],
            1.0),
    "llama31": ([1, 0.193922758, 0.0376060307, 0.00729266508, 0.000524846022, 3.42810235e-05, 6.64786967e-06,
                 1.28917316e-06], 1.0),
    "llama3_factors": ([1, 0.193922758, 0.0194549374, 0.00104335917, 9.96892923e-05, 1.71405118e-05, 3.32393483e-06,
                        6.44586578e-07], 1.0),
    "yarn": ([1, 0.316227764, 0.100000001, 0.025693506, 0.00624999963, 0.00138349656, 0.000250000012, 7.90569466e-05],
             1.138629436111989),
    "yarn_betas": ([1, 0.177827939, 0.0316227786, 0.00421755994, 0.000500000024, 4.44569851e-05, 7.90569356e-06,
                    1.40585337e-06], 1.138629436111989),
    "yarn_not_rounded": ([1, 0.225418001, 0.0508132726, 0.00679495931, 0.000456483918, 1.8188337e-05, 4.09997847e-06,
                          9.24208962e-07], 1.3465735902799727),
    "yarn_mscale": ([1, 0.316227764, 0.100000001, 0.0239147246, 0.00512499968, 0.000849862176, 2.49999994e-05,
                     7.90569447e-06], 0.9210423553163399),
    "yarn_factor": ([1, 0.316227764, 0.100000001, 0.0239147246, 0.00512499968, 0.000849862176, 2.49999994e-05,
                     7.90569447e-06], 1.25),
}


@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_the_published_formulas(name, width):
    c = LlamaConfig(head_dim=width, **SCALINGS[name])
    (got, factor), (want, wanted) = scaled_frequencies(c, width), plain_rotary.frequencies(c, width)
    np.testing.assert_allclose(got, want, rtol=1e-12)
    assert factor == pytest.approx(wanted, rel=1e-12)
    ratio = want * c.rope_theta ** (np.arange(width // 2) * 2 / width)
    kinds = (ratio > 0.999).sum(), (ratio < 1.001 / c.rope_scaling).sum()
    if c.rope_scaling > 1 and name[:4] in ("yarn", "llam") and width > 16:
        assert min(*kinds, len(ratio) - sum(kinds)) > 1, f"the case does not reach all three parts of the rule: {kinds}"


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_frequencies_are_those_of_transformers(name):
    want, factor = TRANSFORMERS[name]
    got, got_factor = scaled_frequencies(LlamaConfig(head_dim=16, **SCALINGS[name]), 16)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert got_factor == pytest.approx(factor, rel=1e-12)


def test_deepseek_v3_multiplies_scores_as_in_transformers():
    """The softmax scale of Transformers 5.24.0's DeepseekV3Attention with the published rope_scaling."""
    c = DeepseekV3Config(head_dim=128, rope_head_dim=64, kv_rank=512, rope_type="yarn", rope_scaling=40.0,
                         rope_original_len=4096, rope_mscale=1.0, rope_mscale_all_dim=1.0)
    assert 192**-0.5 * score_factor(c) == pytest.approx(0.1352337788608801, rel=1e-12)
    got, factor = scaled_frequencies(c, 64)
    np.testing.assert_allclose(got[[9, 11, 16, 23, 24, 31]], [  # the first is kept, the last two are divided by 40
        0.0749894157, 0.0390069261, 0.00550000044, 3.3338034e-05, 2.49999994e-05, 3.33380353e-06], rtol=1e-6)
    assert factor == 1.0 and score_factor(DeepseekV3Config(kv_rank=8, rope_head_dim=2)) == 1.0


MODELS = [
    ("llama", (1, 1, 1), SCALINGS["linear"]),
    ("llama", (1, 1, 1), YARN),
    ("deepseek_v3", (1, 1, 1), YARN | dict(rope_mscale=0.7, rope_mscale_all_dim=1.3)),
    ("qwen3", (2, 1, 2), YARN),
    ("mixtral", (1, 2, 2), SCALINGS["ntk"]),
    ("deepseek_v3", (1, 2, 2), YARN | dict(rope_mscale=0.7, rope_mscale_all_dim=1.3)),
]


@pytest.mark.parametrize(("family", "mesh", "keys"), [
    pytest.param(*case, id=f"{case[0]}-{case[2]['rope_type']}-{case[1]}",
                 marks=slow_if(i == 2))
    for i, case in enumerate(MODELS)])
def test_models_with_scaled_positions_have_the_numbers_of_the_plain_model(family, mesh, keys):
    """Loss and gradients; without scaling both would be others."""
    keys = keys | (dict(rope_head_dim=8) if family == "deepseek_v3" else dict(head_dim=8))
    run = reference.build(family, mesh, **{f"model__{key}": value for key, value in keys.items()})
    params, batch = run.init().params, reference.batch(0)

    def plain(c):
        return jax.jit(jax.value_and_grad(lambda p: reference.loss(c, p, batch)))(jax.device_get(params))

    want, gradient = plain(run.config.model)
    got, grads = run.value_and_grad(run.init(), run.sharded.place(batch))
    assert float(got) == pytest.approx(float(want), rel=1e-5)
    if run.config.model.experts.bias_rate:  # the bias follows the load, not a gradient
        del grads["blocks"]["layer"]["mlp"]["router"]["bias"], gradient["blocks"]["layer"]["mlp"]["router"]["bias"]
    error, leaf = reference.worst(grads, gradient, floor=1e-3 * float(reference.norm_of(gradient)))
    assert error < 1e-5, f"the gradient of {leaf} is off by {error:.1e} of its largest element"
    if mesh == (1, 1, 1):
        _, unscaled = plain(reference.build(family, model__head_dim=run.config.model.head_dim, **(
            dict(model__rope_head_dim=8) if family == "deepseek_v3" else {})).config.model)
        if run.config.model.experts.bias_rate:
            del unscaled["blocks"]["layer"]["mlp"]["router"]["bias"]
        assert reference.worst(unscaled, gradient, floor=1e-3 * float(reference.norm_of(gradient)))[0] > 1e-3, (
            "this case would pass without any scaling")


@pytest.mark.parametrize(("keys", "message"), [
    (dict(rope_type="longrope", rope_scaling=2.0), "model.rope_type: 'longrope' is not supported; known: "),
    (dict(rope_type="yarn"), "model.rope_scaling: rope_type=yarn has no factor to scale by; give one above 1"),
    (dict(rope_scaling=0.5), "model.rope_scaling: 0.5 would shorten the context; give 1 or more"),
    (dict(rope_scaling=4.0, rope_beta_fast=16.0), "model.rope_beta_fast: it is read with rope_type=yarn and"),
    (dict(rope_low_freq_factor=2.0), "model.rope_low_freq_factor: it is read with rope_type=llama3 and"),
    (dict(rope_scaling=4.0, rope_low_freq_factor=4.0), "model.rope_high_freq_factor: 4.0 is not above"),
    (dict(YARN, rope_beta_slow=7.0), "model.rope_beta_fast: 6.0 is below model.rope_beta_slow=7.0"),
    (dict(YARN, rope_theta=1.0), "model.rope_theta: yarn needs a base above 1"),
    (dict(YARN, rope_mscale=1.0), "model.rope_mscale: it has a meaning only together with model.rope_mscale_all_dim"),
    (dict(YARN, rope_attention_factor=-1.0), "model.rope_attention_factor: -1.0 is negative"),
    (dict(rope_type="ntk", rope_scaling=2.0, head_dim=2), "model.rope_type: ntk changes the base by a power"),
])
def test_wrong_scalings_are_refused_in_a_sentence(keys, message):
    with pytest.raises(jt.UserError) as refusal:
        LlamaConfig(**keys)
    assert str(refusal.value).startswith(message)


def test_rotary_turns_pairs_of_the_two_halves():
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(B, T, 3, K)).astype(np.float32), rng.integers(0, 5000, size=(B, T))
    rotary = Rotary(frequencies(K, 10_000.0))
    got = np.asarray(rotary.rotate(jnp.asarray(x), rotary.angles(jnp.asarray(positions))))
    pairs = x[..., : K // 2] + 1j * x[..., K // 2:]  # as complex numbers: a turn is one product
    turned = pairs * np.exp(1j * positions[..., None, None] * 10_000.0 ** (-np.arange(K // 2) / (K // 2)))
    # An angle of thousands of radians in float32 is good to about 1e-4.
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=2e-3)
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


def test_scores_depend_on_the_distance_of_positions_only():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, K)), jnp.float32) for _ in range(2))
    rotary = Rotary(frequencies(K, 100.0))

    def score(i, j):
        a, b = (rotary.rotate(x, rotary.angles(jnp.array([[n]]))) for x, n in ((q, i), (k, j)))
        return float((a * b).sum())

    np.testing.assert_allclose([score(7, 3), score(40, 36)], score(4, 0), rtol=1e-5)
    assert abs(score(4, 0) - score(5, 0)) > 1e-3
