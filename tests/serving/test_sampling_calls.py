"""Sampling by calls of the API: the sequences and log-probabilities of `jt.generate` and of a plain forward pass."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.hub.scoring import score
from jaxtrain.serving import wire
from jaxtrain.serving.service import Limits
from tests.serving import tiny_model
from tests.serving.test_training_calls import engine, folder  # noqa: F401
from tests.serving.wire_client import Client, Failed, datum

PROMPT = [72, 101, 108, 108, 111]
LORA = LoraConfig(rank=4, alpha=32.0)


@pytest.fixture(scope="module")
def server(engine, folder, tmp_path_factory):  # noqa: F811
    with tiny_model.served(folder, tmp_path_factory.mktemp("saved"), engine=engine,
                           limits=Limits(batch=4)) as server:
        yield server


@pytest.fixture
def client(server):
    return Client(server.url)


def trained(client):
    """A model whose adapters change what is said."""
    model = client.model(tiny_model.NAME)
    model.forward_backward([datum(PROMPT, target_tokens=[9] * 5, weights=[1.0] * 5)])
    model.optim_step(learning_rate=0.3)
    return model


def test_adapters_say_what_generate_says_with_them(client, server, engine):  # noqa: F811
    model = trained(client)
    found, before = model.sampler().sample(PROMPT, max_tokens=6, temperature=0, prompt_logprobs=True)
    shape = engine.shape(LORA)
    state = shape.state(server.service.models[model.id].adapters.params)
    wanted, = jt.generate(shape.run, state, [PROMPT], max_new_tokens=6, temperature=0, logprobs=True, ignore_end=True)
    (reason, tokens, logprobs), = found
    assert (reason, tokens) == (wire.LENGTH, list(wanted.tokens))
    np.testing.assert_allclose(logprobs, wanted.logprobs, rtol=1e-5)
    # By a forward pass over all of it: what the trainer computes of a sampled sequence.
    row = [*PROMPT, *tokens]
    _, (again,) = model.forward_backward([datum(row[:-1], target_tokens=row[1:], weights=[0.0] * 10)], forward=True)
    np.testing.assert_allclose(again, [*before[1:], *logprobs], rtol=1e-4, atol=1e-5)
    assert np.isnan(before[0])


@pytest.mark.slow
def test_the_base_and_saved_adapters_have_samplers(client, folder):  # noqa: F811
    model = trained(client)
    path = model.save("mine", "save_weights_for_sampler")
    base, _ = client.sampler(base_model=tiny_model.NAME).sample(PROMPT, max_tokens=4, temperature=0)
    mine, _ = client.sampler(model_path=path).sample(PROMPT, max_tokens=4, temperature=0)
    held, _ = model.sampler().sample(PROMPT, max_tokens=4, temperature=0)
    wanted, = jt.generate(*jt.load_model(folder), [PROMPT], max_new_tokens=4, temperature=0, ignore_end=True)
    assert base[0][1] == list(wanted.tokens) != mine[0][1] == held[0][1]
    assert client.send(f"samplers/{model.client.sampler(model_path=path).id}")["model_path"] == path


def test_a_sampler_keeps_the_weights_it_was_made_of(client):
    model = trained(client)
    sampler = model.sampler()
    before, _ = sampler.sample(PROMPT, max_tokens=4, temperature=0)
    model.forward_backward([datum(PROMPT, target_tokens=[200] * 5, weights=[1.0] * 5)])
    model.optim_step(learning_rate=0.3)
    assert sampler.sample(PROMPT, max_tokens=4, temperature=0)[0][0][1] == before[0][1]
    assert model.sampler().sample(PROMPT, max_tokens=4, temperature=0)[0][0][1] != before[0][1]


@pytest.mark.slow
def test_a_seed_gives_the_same_sequences_whatever_else_is_asked(client):
    """Requests that wait together are generated together, and more than a batch of them."""
    sampler = client.sampler(base_model=tiny_model.NAME)
    alone, _ = sampler.sample(PROMPT, 2, max_tokens=5, seed=7)
    calls = [sampler.submit([1, 2, n], 2, max_tokens=5, seed=n) for n in range(3)]
    again, _ = sampler.sample(PROMPT, 2, max_tokens=5, seed=7)
    other, _ = sampler.sample(PROMPT, 2, max_tokens=5, seed=8)
    for call in calls:
        client.wait(call)
    assert [one[1] for one in alone] == [one[1] for one in again] != [one[1] for one in other]
    assert alone[0][1] != alone[1][1]


def test_what_ends_a_sequence_belongs_to_it(client, engine):  # noqa: F811
    """A token, or the tokens to the end of a text; without either a sequence ends at its length."""
    sampler = client.sampler(base_model=tiny_model.NAME)
    (reason, whole, _), = sampler.sample(PROMPT, max_tokens=40, seed=1, stop=[])[0]
    assert (reason, len(whole)) == (wire.LENGTH, 40)
    (reason, found, logprobs), = sampler.sample(PROMPT, max_tokens=40, seed=1, stop=[whole[2]])[0]
    assert (reason, found, len(logprobs)) == (wire.STOP, whole[:whole.index(whole[2]) + 1], len(found))
    pairs = [engine.words.decode(whole[n:n + 2]) for n in range(39)]
    at = next(n for n, pair in enumerate(pairs) if n and len(pair) == 2 and pair.isascii())
    (reason, found, logprobs), = sampler.sample(PROMPT, max_tokens=40, seed=1, stop=[pairs[at]])[0]
    assert (reason, found, len(logprobs)) == (wire.STOP, whole[:at + 2], at + 2)


@pytest.mark.slow
def test_prompts_are_scored_as_by_the_model(client, folder):  # noqa: F811
    run, state = jt.load_model(folder)
    row = [5, 80, 3, 120, 7, 255]
    wanted, = score(run, state.all_params, [([row[0]], row[1:])])
    _, found = client.sampler(base_model=tiny_model.NAME).sample(row, max_tokens=1, prompt_logprobs=True)
    np.testing.assert_allclose(found[1:], wanted.logprobs, rtol=1e-5)
    _, last = client.sampler(base_model=tiny_model.NAME).sample(row, max_tokens=1, prompt_logprobs=True, last=2)
    assert np.isnan(last[:4]).all()
    np.testing.assert_array_equal(last[4:], found[4:])


@pytest.mark.parametrize(("more", "words"), [
    ({"prompt": [5, 999]}, "999 is not a token of the model"), ({"prompt": []}, "it has 0 tokens"),
    ({"prompt": [1] * 256}, "leaves room for one"), ({"count": 5}, "give 1 to 4"),
    ({"temperature": -1}, "out of range"), ({"top_p": "much"}, "is not a number"), ({"max_tokens": 0}, "below 1"),
    ({"stop": [-1]}, "neither texts nor tokens"), ({"stop": {"a": 1}}, "neither texts nor tokens")])
def test_what_cannot_be_sampled_is_refused(client, more, words):
    sampler = client.sampler(base_model=tiny_model.NAME)
    with pytest.raises(Failed, match=words) as refused:
        sampler.sample(**{"prompt": PROMPT, **more})
    assert refused.value.status == 400


@pytest.mark.slow
def test_samplers_in_memory_make_room_for_newer_ones(engine, folder, tmp_path):  # noqa: F811
    with tiny_model.served(folder, tmp_path, engine=engine, limits=Limits(samplers=1)) as server:
        client = Client(server.url)
        model = client.model(tiny_model.NAME)
        path = model.save("kept", "save_weights_for_sampler")
        saved, first = client.sampler(model_path=path), model.sampler()
        assert saved.sample(PROMPT, max_tokens=2, temperature=0)
        with pytest.raises(Failed, match="made room for newer ones"):
            first.sample(PROMPT, max_tokens=2)
        assert model.sampler().sample(PROMPT, max_tokens=2)
        assert saved.sample(PROMPT, max_tokens=2, temperature=0)  # it is loaded again
        with pytest.raises(Failed, match="is not served here"):
            client.sampler(base_model="another")
        with pytest.raises(Failed, match="there is no tinker://"):
            client.sampler(model_path="tinker://no/sampler_weights/such")
        assert jax.tree.leaves(engine.base)  # held once, and not by any of them
