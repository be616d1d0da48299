"""Models with states or keys that layers share: documents in a row are as each alone, and generation is what the whole
model would choose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.sharding import activations, mesh_context
from tests.hub import published, published_models
from tests.tiers import exhaustive, slow

ROWS, LENGTH = 4, 16
# Gated DeltaNet; Mamba-2, experts and attention without positions; attention beside Mamba-2; short convolutions; shared
# keys and inputs of layers.
NAMES = ("nemotron_h_moe", *slow("qwen3_5", "falcon_h1", "lfm2"), *exhaustive("gemma4_small"))


@pytest.fixture(scope="module", params=NAMES)
def model(request, tmp_path_factory):
    """A run, its state, and (tokens, segments, positions) -> logits: compiled once."""
    folder = published.write(tmp_path_factory.mktemp("model"), published.truth(request.param))
    run, params = published_models.loaded(folder, fsdp=2, tensor=2)

    @jax.jit
    def compiled(params, *arrays):
        found = run.model.merge(params)(*(activations.constrain(x, "batch", "seq") for x in arrays))
        return activations.constrain(found, None, None, None)

    def logits(*arrays):
        with mesh_context.use(run.mesh, run.sharded.rules):
            return np.asarray(compiled(params, *(jnp.asarray(x, jnp.int32) for x in arrays)))

    return run, run.with_params(params), logits


def rows(*each):
    """Rows [ROWS, LENGTH] that begin with these numbers, and are 0 behind them."""
    return np.stack([np.pad(np.asarray(row, np.int32), (0, LENGTH - len(row))) for row in (*each, *[[]] * ROWS)][:ROWS])


def test_documents_in_one_row_are_as_each_alone(model):
    *_, logits = model
    documents = [*np.split(np.random.default_rng(0).integers(0, 24, LENGTH), (5, 12))]
    numbers = [np.full(len(one), n + 1) for n, one in enumerate(documents)]
    places = [np.arange(len(one)) for one in documents]
    found = logits(*(rows(np.concatenate(each), *each) for each in (documents, numbers, places)))
    alone = np.concatenate([found[n + 1, :len(one)] for n, one in enumerate(documents)])
    np.testing.assert_allclose(found[0], alone, rtol=1e-4, atol=1e-5 * np.abs(alone).max())


def test_greedy_generation_is_the_argmax_of_the_whole_model(model):
    """Prompts of several lengths are computed behind padding, then one token at a time with states in a cache."""
    run, state, logits = model
    prompts = [[3, 7, 1], [9, 4, 4, 20, 13, 2], [11], [5, 6, 5, 8, 1]]
    found = jt.generate(run, state, prompts, max_new_tokens=10, temperature=0, ignore_end=True)
    texts = [[*prompt, *one.tokens] for prompt, one in zip(prompts, found, strict=True)]
    assert all(len(one.tokens) == 10 for one in found)
    tokens = rows(*texts)
    best = logits(tokens, np.ones_like(tokens), np.broadcast_to(np.arange(LENGTH), tokens.shape)).argmax(-1)
    for prompt, text, row in zip(prompts, texts, best, strict=True):
        assert text[len(prompt):] == row[len(prompt) - 1:len(text) - 1].tolist()
