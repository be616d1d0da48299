"""Training by calls of the API: the numbers of a run of jaxtrain, of plain formulas, and of each model alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.config.load import make_config
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.hf import hf_config
from jaxtrain.serving import lora_engine, saved_adapters
from jaxtrain.serving.lora_engine import Engine
from jaxtrain.serving.token_loss import LOSSES
from jaxtrain.train_step import partition
from tests.hub import published
from tests.serving import tiny_model
from tests.serving.policy_data import data_of, policy_datums
from tests.serving.wire_client import Client, Failed, datum
from tests.tiers import slow
from tests.tiny import devices

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.97, "eps": 1e-9, "weight_decay": 0.1, "grad_clip_norm": 0.5}
ROWS, TOKENS = 4, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def engine(folder, cache):
    with devices(1):
        yield Engine.load(folder, batch_tokens=256)


@pytest.fixture
def client(engine, folder, tmp_path):
    with tiny_model.served(folder, tmp_path, engine=engine) as server:
        yield Client(server.url)


def batch(step):
    """Rows of one text each, and weights of which some are 0; they come again after three steps."""
    random = np.random.default_rng(step % 3)
    tokens = random.integers(0, 256, (ROWS, TOKENS + 1)).astype(np.int32)
    weights = (random.random((ROWS, TOKENS)) < 0.8).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": np.ones((ROWS, TOKENS), np.int32),
            "positions": np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1)), "weights": weights}


def datums(step):
    """The same as data, whose weights make a mean of the API's sum."""
    rows = batch(step)
    return [datum(tokens, target_tokens=targets, weights=weights / rows["weights"].sum())
            for tokens, targets, weights in zip(rows["tokens"], rows["targets"], rows["weights"], strict=True)]


def trained_run(folder, steps, rank=4):
    """The run of `jaxtrain train` with these batches, settings and seed."""
    keys = {"lora.rank": rank, "lora.alpha": 32.0, "train.seed": 3, "train.steps": steps, "data.seq_len": TOKENS,
            "data.global_batch_size": ROWS, "optimizer.schedule": "constant", "optimizer.learning_rate": 1e-2,
            "optimizer.warmup_steps": 0, "optimizer.b1": 0.9, "optimizer.b2": 0.97, "optimizer.eps": 1e-9,
            "optimizer.weight_decay": 0.1, "optimizer.clip_norm": 0.5, "mesh.data": 1}
    return jt.build(make_config(hf_config.starting_config(f"{folder}"), keys), data=jt.BatchFunction(batch))


def test_losses_are_those_of_a_run_of_jaxtrain(client, folder):
    """Twelve steps of AdamW with clipping and decay; also the norms of gradients."""
    with devices(1):
        run = trained_run(folder, 12)
        state, model = run.init(), client.model(tiny_model.NAME, seed=3)
        for step in range(12):
            state, metrics = run.step(state, run.batch(step))
            loss, _ = model.forward_backward(datums(step))
            np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-5)
            np.testing.assert_allclose(model.optim_step(**ADAM)["grad_norm"], metrics["grad_norm"], rtol=1e-4)


def formula(loss, logp, inputs, numbers):
    """The losses as https://tinker-docs.thinkingmachines.ai/tinker/losses and arXiv 2507.18071 write them."""
    if loss == "cross_entropy":
        return -(logp * inputs["weights"]).sum()
    old, advantages, counted = inputs["logprobs"], inputs["advantages"], inputs["sequence_ratio_mask"]
    ratio = jnp.exp(logp - old)
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss == "dro":
        return -(logp * advantages - 0.5 * numbers["beta"] * (logp - old) ** 2).sum()
    if loss == "gspo":
        ratio = jnp.exp((counted * (logp - old)).sum() / counted.sum()) * jnp.ones_like(logp)
    clipped = jnp.clip(ratio, numbers["clip_low_threshold"], numbers["clip_high_threshold"])
    if loss == "cispo":
        return -(jax.lax.stop_gradient(clipped) * logp * advantages).sum()
    return -jnp.minimum(ratio * advantages, clipped * advantages).sum()


def moved(adapters):
    """Adapters whose second matrix is not 0, so that the first one has a gradient."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: jax.device_put(
        np.asarray(x) + random.normal(size=x.shape, scale=0.1).astype(np.float32), x.sharding), adapters)


def plain(engine, adapters, loss, numbers):
    """The loss and its gradient with respect to all adapters, of the plain model, row by row."""
    shape, base = engine.shape(LoraConfig(rank=4, alpha=32.0)), jax.device_get(engine.base)

    def total(params):
        model, found = shape.run.model.merge(partition.merge(base, params)), 0.0
        for tokens, inputs in policy_datums():
            logp = jax.nn.log_softmax(model(tokens[None])[0].astype(jnp.float32))
            logp = logp[np.arange(len(tokens)), inputs["target_tokens"]]
            found += formula(loss, logp, inputs | {"weights": np.ones(len(tokens), np.float32)}, numbers)
        return found
    return jax.jit(jax.value_and_grad(total))(jax.device_get(adapters))


CLIPS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


@pytest.mark.parametrize(("loss", "numbers"), [
    *slow(("cross_entropy", {}), ("importance_sampling", {}), ("ppo", CLIPS), ("cispo", {}), ("dro", {"beta": 0.2}),
          ("gspo", {}), ("gspo", CLIPS))])
def test_loss_and_gradient_are_those_of_the_plain_formula(engine, loss, numbers):
    with devices(1):
        shape = engine.shape(LoraConfig(rank=4, alpha=32.0))
        model = shape.around(moved(shape.begin(3).params))
        data = data_of(loss, engine, numbers)
        wanted, gradient = plain(engine, model.params, loss, {**LOSSES[loss].numbers, **numbers})
        for _ in range(2):  # gradients add up
            total, _ = shape.forward_backward(model, data, loss)
        np.testing.assert_allclose(total, wanted, rtol=1e-5)
        largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
        jax.tree.map(lambda found, plain: np.testing.assert_allclose(found, 2 * plain, rtol=1e-4,
                                                                     atol=1e-5 * largest),
                     jax.device_get(model.gradient), gradient)


def weights(model):
    """The arrays of a model as bytes."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model)]


def of(server_model, service):
    adapters = service.models[server_model.id].adapters
    return weights((adapters.params, adapters.first, adapters.second))


def test_models_in_turn_have_the_bits_of_each_alone(engine, folder, tmp_path):
    """Two ranks, two seeds, two optimizers; one accumulates over two calls."""
    with tiny_model.served(folder, tmp_path, engine=engine) as server:
        client, other = Client(server.url), Client(server.url)

        def one(model, step):
            model.forward_backward(datums(step))
            return model.optim_step(**ADAM)

        def two(model, step):
            model.forward_backward(policy_datums("ppo"), "ppo")
            model.forward_backward(datums(step + 100))
            return model.optim_step(learning_rate=3e-3)

        with devices(1):
            alone = client.model(tiny_model.NAME, 4, 3), other.model(tiny_model.NAME, 2, 8, train_mlp=False)
            for model, do in zip(alone, (one, two), strict=True):
                for step in range(3):
                    do(model, step)
            together = client.model(tiny_model.NAME, 4, 3), other.model(tiny_model.NAME, 2, 8, train_mlp=False)
            for step in range(3):
                for model, do in zip(together, (one, two), strict=True):
                    do(model, step)
        for before, after in zip(alone, together, strict=True):
            assert of(before, server.service) == of(after, server.service)
        assert of(alone[0], server.service) != of(alone[1], server.service)


def test_a_saved_state_continues_to_the_bit(engine, folder, tmp_path):
    """In another server, as a new model or in one that is there; the gradient between two steps is saved, too."""
    with devices(1):
        with tiny_model.served(folder, tmp_path, engine=engine) as server:
            model = Client(server.url).model(tiny_model.NAME)
            for step in range(2):
                model.forward_backward(datums(step))
                model.optim_step(**ADAM)
            model.forward_backward(datums(2))
            path = model.save("half-way")
            with pytest.raises(Failed, match="is there already"):
                model.save("half-way")
            model.forward_backward(datums(3))
            model.optim_step(**ADAM)
            assert model.save("half-way", overwrite=True) == path
            wanted = of(model, server.service)
        with tiny_model.served(folder, tmp_path, engine=engine) as server:
            client = Client(server.url)
            again = client.restored(path)
            assert of(again, server.service) == wanted
            again.forward_backward(datums(4))
            again.optim_step(**ADAM)
            further = again.save("further")
            other = client.model(tiny_model.NAME, seed=99)
            other.load(path)
            other.forward_backward(datums(4))
            other.optim_step(**ADAM)
            assert of(other, server.service) == of(again, server.service) != wanted
            other.load(further, optimizer=False)
            adapters = server.service.models[other.id].adapters
            assert adapters.steps == 0 and weights(adapters.params) == weights(
                server.service.models[again.id].adapters.params)


def test_a_saved_gradient_counts_in_the_next_step(engine, folder, tmp_path):
    with devices(1), tiny_model.served(folder, tmp_path, engine=engine) as server:
        client = Client(server.url)
        model = client.model(tiny_model.NAME)
        model.forward_backward(datums(0))
        again = client.restored(model.save("between"))
        for one in (model, again):
            one.optim_step(**ADAM)
        assert of(again, server.service) == of(model, server.service)


def test_data_of_a_call_that_fails_leave_no_trace(client, engine):
    """Nothing counts of a call whose last datum cannot be computed."""
    with devices(1):
        model = client.model(tiny_model.NAME)
        good, huge = datums(0), datum([1, 2], target_tokens=[2, 3], weights=[3e38, 3e38])
        model.forward_backward(good)
        with pytest.raises(Failed, match="nothing of it is kept"):
            model.forward_backward([*good, huge])
        norm = model.optim_step(**ADAM)["grad_norm"]
        other = client.model(tiny_model.NAME)
        other.forward_backward(good)
        assert other.optim_step(**ADAM)["grad_norm"] == norm
        with pytest.raises(Failed, match="no gradient since the last step"):
            other.optim_step(**ADAM)


def test_a_save_that_fails_leaves_what_was_saved_before(engine, folder, tmp_path, monkeypatch):
    """The disk is full, or the server is killed, before the one rename that makes a state count."""
    with devices(1), tiny_model.served(folder, tmp_path, engine=engine) as server:
        client = Client(server.url)
        model = client.model(tiny_model.NAME)
        path, before = model.save("state"), of(model, server.service)
        model.forward_backward(datums(0))
        model.optim_step(**ADAM)

        def full(path, content):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(saved_adapters.atomic_files, "write_json", full)
            with pytest.raises(Failed, match="No space left on device"):
                model.save("state", overwrite=True)
            with pytest.raises(Failed, match="No space left on device"):
                model.save("another")
        assert [one["tinker_path"] for one in client.send("checkpoints")["checkpoints"]] == [path]
        assert of(client.restored(path), server.service) == before
        assert model.save("another")


@pytest.mark.slow
def test_mlp_layers_of_experts_have_adapters_too(tmp_path, cache):
    """Each expert has its own; a sampler says of its tokens what the trainer computes of them."""
    with devices(1):
        folder = published.write(tmp_path / "mixtral", published.truth("mixtral"))
        with tiny_model.served(folder, tmp_path / "saved") as server:
            model = Client(server.url).model(tiny_model.NAME, 2, 3, train_attn=False)
            given = [datum([1, 2, 3, 4], target_tokens=[2, 3, 4, 5], weights=[1.0] * 4)]
            losses = []
            for _ in range(3):
                losses.append(model.forward_backward(given)[0])
                model.optim_step(learning_rate=0.02)
            again = model.client.restored(model.save("experts"))
            assert losses[2] < losses[1] < losses[0] and again.forward_backward(given, forward=True)[0] < losses[2]
            paths = flatten(server.service.models[again.id].adapters.params)
            assert paths and all("/mlp/adapter/" in path for path in paths)
            (_, tokens, logprobs), = model.sampler().sample([1, 2], max_tokens=6, seed=1, stop=[])[0]
            row = [1, 2, *tokens]
            _, (found,) = model.forward_backward([datum(row[:-1], target_tokens=row[1:], weights=[1.0] * 7)],
                                                 forward=True)
            np.testing.assert_allclose(found[1:], logprobs, atol=1e-5)


def test_programs_of_few_kinds_of_adapters_are_kept(engine, monkeypatch):
    monkeypatch.setattr(lora_engine, "SHAPES", 2)
    known = dict(engine.shapes)
    first, second = (engine.shape(LoraConfig(rank=rank)) for rank in (2, 3))
    assert engine.shape(LoraConfig(rank=2)) is first
    third = engine.shape(LoraConfig(rank=5))
    assert [*engine.shapes.values()] == [first, third]  # the ones used last
    assert engine.shape(LoraConfig(rank=3)) is not second
    engine.shapes.clear()
    engine.shapes.update(known)
