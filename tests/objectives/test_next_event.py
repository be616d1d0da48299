"""Events: loss, gradients and metrics of plain formulas on any mesh; and runs by a config over a prepared corpus."""

import functools
import math

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jaxtrain as jt
from jaxtrain.data.corpus.text_cache import load_corpus
from jaxtrain.data.loading.batch_spec import BatchSpec
from jaxtrain.data.loading.modalities.sequence_batches import load_sequences, sequence_batches
from jaxtrain.data.prepare_sequences.event_streams import Events
from jaxtrain.data.prepare_sequences.prepare_sequences import prepare_sequences
from jaxtrain.objectives.next_event import NextEvent
from jaxtrain.plan.estimate import estimate
from jaxtrain.plan.targets import parse
from jaxtrain.sharding.mesh import AXES
from tests.numerics import reference
from tests.objectives import plain_events as plain
from tests.objectives.tuned import lines_of_same_bits
from tests.tiers import slow_if

CASES = {
    "one device": dict(model__window=5, model__tied_embeddings=False),
    "data, fsdp, tensor": dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, train__accumulation=2),
    "ring, tensor": dict(mesh__context=4, mesh__context_strategy="ring", mesh__tensor=2, model__tied_embeddings=False),
    "1f1b, context, fsdp": dict(mesh__stage=2, mesh__context=2, mesh__fsdp=2),
    "without the time": dict(mesh__fsdp=4, mesh__tensor=2, model__time_loss=0.0, optimizer__zero_stage=2),
}
SLOW = ("1f1b, context, fsdp",)


@functools.cache
def begun(**keys):
    """Parameters on the host, of which none is 0, as one device makes them."""
    run = jt.build(plain.config(**keys), devices=jax.devices()[:1])
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: (a + rng.normal(0, 0.02, a.shape)).astype(np.float32),
                        jax.device_get(run._jitted_init(0).params))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=slow_if(name in SLOW)) for name in CASES])
def test_loss_gradients_and_metrics_are_those_of_the_formulas(name):
    config = plain.config(**CASES[name])
    run = jt.build(config, devices=jax.devices()[: math.prod(getattr(config.mesh, axis) for axis in AXES)])
    params = begun(**{key: value for key, value in CASES[name].items() if key.startswith("model")})
    batch, state = plain.batch(), reference.start_from(run, params)
    want, slopes = jax.jit(jax.value_and_grad(lambda params: plain.loss(config.model, params, batch)))(params)
    got, grads = jax.device_get(run.value_and_grad(state, batch))
    assert float(got) == pytest.approx(float(want), rel=1e-5)
    error, leaf = reference.worst(grads, jax.device_get(slopes), floor=1e-3 * float(reference.norm_of(slopes)))
    assert error < 2e-5, leaf
    total, weight, sums = run.sharded.evaluate(state, batch)
    told = run.objective.evaluation.metrics(sums)
    truth = plain.metrics(config.model, params, batch)
    assert float(total / weight) == pytest.approx(float(truth["cross_entropy"]), rel=1e-5)
    for metric, value in truth.items():
        assert float(told[metric]) == pytest.approx(float(value), rel=1e-5), metric
    assert truth["accuracy"] > 0 and set(run.objective.evaluation_metrics) <= set(told)


# ----------------------------------------------------------------------------------------------------- runs by a config
@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Users who mostly go from one item to the next of seven."""
    folder, rng = tmp_path_factory.mktemp("events"), np.random.default_rng(0)
    rows = []
    for user in range(120):
        item = rng.integers(7)
        for at in range(int(rng.integers(2, 17))):
            rows.append((f"u{user}", 60 * at, f"i{item}", f"s{item % 2}", float(item)))
            item = (item + 1 + (rng.random() < 0.1)) % 7
    columns = ["user", "at", "item", "shop", "price"]
    pq.write_table(pa.table(list(map(list, zip(*rows, strict=True))), columns), folder / "events.parquet")
    source = Events("user", "at", ("item", "shop"), ("price",), eval_fraction=0.2)
    return prepare_sequences([str(folder / "events.parquet")], folder / "corpus", source)


def of(corpus, **keys):
    return plain.config(data__source=str(corpus.path), **keys)


@pytest.mark.slow
def test_a_run_learns_and_goes_on_with_the_same_bits(corpus, cache, tmp_path):
    config = of(corpus, data__buckets=[8, 16], train__steps=12, train__progress=False, checkpoint__every=6,
                mesh__tensor=2)
    run = jt.build(config, devices=jax.devices()[:2])
    lines = lines_of_same_bits(run, tmp_path, last=12)
    assert lines[-1].keys() == {"step", "eval_loss", "eval_accuracy", "eval_perplexity", "eval_time_error"}
    assert lines[-1]["eval_loss"] < lines[0]["cross_entropy"] and lines[-2]["loss"] < lines[0]["loss"]
    assert {shape[1] for shape in run.train_batches.shapes_of(0, 12)} == {8, 16}


def batches(config, split="train"):
    """Return the batches that a run of this config trains or is evaluated on, without building it."""
    declared = BatchSpec(NextEvent(None, columns=config.model).batch_spec, "NextEvent")
    return sequence_batches(config.data, load_sequences(config.data), split, declared.arrays), declared


def test_batches_are_the_columns_by_step(corpus):
    (by_step, declared), (again, _) = batches(of(corpus)), batches(of(corpus))
    held_out, _ = batches(of(corpus), "eval")
    assert by_step.shapes_of(0, 9) == [(16, 8), (16, 16)]
    for step in range(4):
        batch = by_step[step]
        assert declared.check(batch) == by_step.shape(step)
        some = by_step.rows(step, [3, 1])  # as one of several processes reads them
        assert all(np.array_equal(some[name], batch[name][[3, 1]]) for name in batch)
        assert all(np.array_equal(again[step][name], batch[name]) for name in batch)
        for row, number in enumerate(by_step.numbers(step, range(16))):
            there = {} if number is None else corpus.train[number]
            events = len(there.get("item", ()))
            assert all(np.array_equal(batch[name][row, :events], there[name]) for name in set(there) & set(batch))
            assert batch["weights"][row].tolist() == [1] * events + [0] * (len(batch["weights"][row]) - events)
    held_out = [held_out[n] for n in range(held_out.num_batches)]
    assert sum(int(batch["weights"].sum()) for batch in held_out) == corpus.eval.counts().sum()
    assert {batch["item"].shape for batch in held_out} == {(16, 16)}


@pytest.mark.slow
def test_a_layout_is_planned_without_the_corpus():
    found = estimate(plain.config(mesh__data=2, mesh__tensor=2), parse("h100x4", None)[0], 4)
    assert found.fits and found.seconds > 0 and found.memory["parameters"] > 0


@pytest.mark.parametrize(("keys", "message"), [
    (dict(data__seq_len=8), "data.seq_len: 54 sequences have more than 8 steps, the longest 16; raise it, or tr"),
    (dict(model__categories={"page": 9}, model__numbers=[]), "data.source: it has no column 'page', which the model r"),
    (dict(model__categories={"item": 5}), "data.source: its column 'item' has ids up to 7, and the model takes those"),
    (dict(data__source="stdlib"), "data.source: stdlib is not a folder with a prepared corpus of sequences; name one"),
    (dict(data__packing="concat"), "data.packing: events has one sequence of a prepared corpus in a row; set data.pac"),
    (dict(lora__rank=2), "lora.rank: it is for decoders of text, and events is not one; leave it out"),
    (dict(train__sample_tokens=9), "train.sample_tokens: it is for decoders of text, and events is not one; leave"),
    (dict(model__predict="shops"), "model.predict: 'shops' is not among model.categories; did you mean 'shop'?"),
    (dict(model__categories={}), "model.categories: events without any cannot be predicted; name the columns that pre"),
    (dict(model__categories={"item": 0}), "model.categories.item: 0 is not a number of ids; give 1 or more"),
])
def test_mistakes_are_told_in_one_line(corpus, keys, message):
    with pytest.raises(jt.UserError) as refusal:
        batches(plain.config(**{"data__source": str(corpus.path)} | keys))
    assert f"{refusal.value}".startswith(message)


def test_longer_sequences_lose_their_ends_if_asked(corpus):
    by_step, _ = batches(of(corpus, data__seq_len=8, data__crop=True))
    assert by_step.shapes_of(0, 1) == [(16, 8)]
    with pytest.raises(jt.UserError, match=r"^data\.crop: gpt2 has rows that hold all of a text; leave it out"):
        reference.tiny(data__crop=True)


def test_a_corpus_of_the_other_kind_is_refused(corpus):
    with pytest.raises(jt.UserError, match="is a corpus of sequences, not of text; name a model of sequences"):
        load_corpus(reference.tiny(data__source=str(corpus.path)).data)


def test_what_continues_text_refuses_events():
    run = jt.build(plain.config(), devices=1)
    with pytest.raises(jt.UserError, match="run: events is not a decoder of text"):
        jt.generate(run, None, ["a"], max_new_tokens=2)
