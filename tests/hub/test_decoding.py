"""Decoding with the cache gives the numbers of a whole forward pass, for every family, on any mesh, in any batch."""

import functools
import math
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.data.tokenizers.tokenizer import ByteTokenizer
from jaxtrain.hub.decoding import Decoding, decoding
from jaxtrain.hub.sampling import Sampling
from jaxtrain.sharding.mesh import AXES
from tests.numerics import reference
from tests.numerics.plain_lora import at_random, merged
from tests.tiers import exhaustive, slow

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12], [5, 6]]
NEW, LONGEST = 12, 32  # the windows of 5 and 6 are shorter than the texts
FAMILIES = ("gpt2", "gpt2_untied", "llama", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe", "deepseek_v3",
            "alternating", "gpt_oss")
QUICK = ("gpt2",)
SLOW = ("gemma3", "deepseek_v3")  # of each kind of cache one: of a window, of latents


@functools.cache  # and with it its compiled programs
def build(family, **keys):
    config = reference.tiny(family, model__max_seq_len=LONGEST, **keys)
    many = math.prod(getattr(config.mesh, axis) for axis in AXES)
    return jt.build(config, devices=jax.devices()[:many])


@functools.cache
def params(family, **keys):
    """Parameters of which none has its initial value: logits that differ clearly."""
    run, rng = build(family, **keys), np.random.default_rng(0)
    return jax.tree.map(lambda p: 0.2 * rng.standard_normal(p.shape).astype(np.float32), run.abstract.params)


def state(run, family, **keys):
    return replace(run.abstract, params=jax.tree.map(jax.device_put, params(family, **keys),
                                                     run.layout.state.params))


@functools.cache
def continued(family, temperature=0.0):
    run = build(family)
    return jt.generate(run, state(run, family), PROMPTS, max_new_tokens=NEW, temperature=temperature, logprobs=True,
                       seed=3)


@functools.cache
def forward(family):
    """The whole forward pass without a mesh, and without a capacity of experts."""
    run = build(family, **({"model__capacity_factor": 0.0} if family in reference.EXPERTS else {}))
    weights = jax.tree.map(jnp.asarray, params(family))
    return jax.jit(lambda tokens: run.model.merge(weights)(tokens))


def logits(family, texts):
    tokens = np.zeros((len(texts), LONGEST), np.int32)
    for row, text in enumerate(texts):
        tokens[row, :len(text)] = text
    return np.asarray(forward(family)(tokens))


@pytest.mark.parametrize("family", [
    *QUICK, *slow(*SLOW), *exhaustive(*(family for family in FAMILIES if family not in QUICK + SLOW))])
def test_tokens_and_logits_are_those_of_the_whole_forward_pass(family):
    for temperature in (0.0, 1.0):
        records = continued(family, temperature)
        truth = logits(family, [[*prompt, *one.tokens] for prompt, one in zip(PROMPTS, records, strict=True)])
        for row, (prompt, one) in enumerate(zip(PROMPTS, records, strict=True)):
            assert (one.finish_reason, len(one.tokens)) == ("length", NEW)
            here = truth[row, len(prompt) - 1:len(prompt) - 1 + NEW]
            key = jax.random.fold_in(jax.random.key(3), row)
            noise = np.stack([jax.random.gumbel(jax.random.fold_in(key, n), here.shape[-1:]) for n in range(NEW)])
            assert list(one.tokens) == (here + temperature * noise).argmax(-1).tolist()
            want = jax.nn.log_softmax(here)[np.arange(NEW), list(one.tokens)]
            np.testing.assert_allclose(one.logprobs, want, rtol=1e-5, atol=1e-5)


    check_all_logits(build(family), family)


@pytest.mark.parametrize(("family", "sizes"), [
    *exhaustive(("gpt2", {"tensor": 2}), ("deepseek_v3", {"tensor": 2, "fsdp": 2}))])
def test_adapters_are_part_of_the_model(family, sizes):
    """Adapters of latents count too, whose projections are absorbed while one token at a time is computed."""
    run = build(family, lora__rank=3, lora__alpha=6.0, **{f"mesh__{axis}": size for axis, size in sizes.items()})
    whole = at_random(jax.device_get(run._jitted_init(0).all_params))
    plain = build(family)
    greedy = dict(max_new_tokens=NEW, temperature=0, logprobs=True)
    found = jt.generate(run, run.with_params(whole), PROMPTS, **greedy)
    want = jt.generate(plain, plain.with_params(merged(whole, 2.0)), PROMPTS, **greedy)
    for one, other in zip(found, want, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)


def check_all_logits(run, family):
    """Check the logits of all tokens, not of the chosen ones alone: after the prompts, and after some steps."""
    programs, weights = decoding(run), state(run, family).all_params
    tokens, begins = np.zeros((4, 16), np.int32), np.zeros(4, int)
    for row, prompt in enumerate(PROMPTS):
        begins[row] = 16 - len(prompt)
        tokens[row, begins[row]:] = prompt
    held = begun(programs, weights, tokens, begins, 32)
    for until, steps in ((0, 0), (1, 1), (7, 6), (11, 4)):
        said = held.get("said", [[]] * 4)
        held = programs.go_on(programs.ready(weights), held, steps, np.full(1, -1, np.int32), Sampling(0.0),
                              reference.VOCAB)
        said = [[*one, *new[:steps]] for one, new in zip(said, programs.read(held)["tokens"].tolist(), strict=True)]
        texts = [[*prompt, *one] for prompt, one in zip(PROMPTS, said, strict=True)]
        want = logits(family, texts)[np.arange(4), [len(text) - 1 for text in texts]]
        np.testing.assert_allclose(held["logits"], want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
        held["said"] = said


def begun(programs, weights, tokens, begins, slots):
    """Rows of prompts that begin at these slots, with room for so many tokens each."""
    rows, width = tokens.shape
    new = programs.prefill(weights, tokens, begins, None, False)
    each = {"slot": width - begins, "count": np.zeros(rows), "limits": np.full(rows, slots)}
    return programs.arrange(new, np.arange(rows), slots) | {
        name: programs.place(column.astype(np.int32)) for name, column in each.items()} | {
        "done": programs.place(np.zeros(rows, bool)), "seeds": programs.place(np.zeros((rows, 3), np.uint32))}


@pytest.mark.parametrize(("family", "sizes"), [
    *slow(("gemma3", dict(context=2, tensor=4)), ("deepseek_v3", dict(fsdp=2, expert=2, tensor=2))),
    *exhaustive(("gpt2", dict(tensor=8)), ("llama", dict(data=2, fsdp=2, tensor=2)), ("qwen3", dict(fsdp=4, stage=2)),
                ("mixtral", dict(expert=4, tensor=2)), ("gpt_oss", dict(expert=2, context=2, tensor=2)))], ids=str)
def test_any_mesh_gives_the_same_tokens(family, sizes):
    run = build(family, **{f"mesh__{axis}": size for axis, size in sizes.items()})
    found = jt.generate(run, state(run, family), PROMPTS, max_new_tokens=NEW, temperature=1.0, logprobs=True, seed=3)
    for one, other in zip(found, continued(family, 1.0), strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "keys"), [
    *slow(("deepseek_v3", dict(model__rope_type="yarn", model__rope_scaling=4.0, model__rope_original_len=8,
                               model__rope_mscale=1.0, model__rope_mscale_all_dim=1.0, model__capacity_factor=0.0))),
    *exhaustive(("llama", dict(model__rope_scaling=4.0, model__rope_original_len=8)))], ids=str)
def test_scaled_positions_are_those_of_the_whole_forward_pass(family, keys):
    """DeepSeek's factor of all scores is included, which differs for absorbed latents."""
    run = build(family, **keys)
    held = state(run, family, **keys)
    found = jt.generate(run, held, PROMPTS[:2], max_new_tokens=NEW, temperature=0, logprobs=True)
    model = jax.jit(lambda tokens: run.module(held)(tokens))
    for prompt, one in zip(PROMPTS, found, strict=False):
        text = [*prompt, *one.tokens]
        logits = np.asarray(model(np.array([text + [0] * (LONGEST - len(text))])))[0, len(prompt) - 1:len(text) - 1]
        assert list(one.tokens) == logits.argmax(-1).tolist()
        want = jax.nn.log_softmax(logits)[np.arange(NEW), list(one.tokens)]
        np.testing.assert_allclose(one.logprobs, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_fewer_key_heads_than_devices():
    keys = dict(model__num_kv_heads=2)
    alone = build("llama", **keys)
    want = jt.generate(alone, state(alone, "llama", **keys), PROMPTS, max_new_tokens=NEW, temperature=0)
    whole = {"mesh__overrides__kv_heads": "none", "mesh__overrides__act_kv_heads": "none"}
    run = build("llama", mesh__data=2, mesh__tensor=4, **keys, **whole)
    assert jt.generate(run, state(run, "llama", **keys), PROMPTS, max_new_tokens=NEW, temperature=0) == want


@pytest.mark.slow
def test_the_cache_holds_key_heads_and_latents_only():
    def shapes(family):
        run = build(family)
        programs = decoding(run)
        held = begun(programs, state(run, family).all_params, np.ones((4, 16), np.int32), np.zeros(4, int), 32)
        return jax.tree.map(jnp.shape, held["entries"])

    one = {"latents": (4, 32, 26)}  # 24 wide, and a rotary key of 2
    assert shapes("deepseek_v3") == {"first_blocks": [one], "blocks": [one, one]}


NO_WORK = {"parameter", "get-tuple-element", "tuple", "while", "bitcast", "fusion", "scatter",
           "dynamic-update-slice"}


@pytest.mark.parametrize(("family", "keys"), [
    ("gpt2", {}), *(pytest.param(family, dict(train__precision="bfloat16"), marks=pytest.mark.slow)
                    for family in ("gemma3", "deepseek_v3")),
    *(pytest.param(family, dict(train__precision="bfloat16"), marks=pytest.mark.exhaustive)
      for family in ("gpt2", "alternating"))], ids=str)
def test_a_cpu_changes_the_cache_in_place(family, keys, monkeypatch):
    """Each array is updated once for a token; none is copied, converted or taken out of a stack."""
    run, slots = build(family, **keys), 52  # no other array has this dimension before the last
    programs = decoding(run)
    go_on = programs.go_on_program
    weights = state(run, family, **keys).all_params
    held = begun(programs, weights, np.ones((3, 20), np.int32), np.zeros(3, int), slots)
    monkeypatch.setitem(programs.__dict__, "go_on_program", lambda *args: go_on.lower(*args).compile().as_text())
    text = programs.go_on(programs.ready(weights), held, 5, np.full(1, -1, np.int32), Sampling(), 64)
    arrays = jax.tree.leaves(held["entries"])
    kinds = Counter(re.findall(rf"= \w+\[(?:\d+,)*{slots},{arrays[0].shape[-1]}\]\S* ([\w-]+)\(", text))
    assert kinds["scatter"] + kinds["dynamic-update-slice"] == len(arrays)  # the latter in a loop over rows
    assert not kinds.keys() - NO_WORK


@pytest.mark.parametrize("family", [
    *exhaustive("gpt_oss", "alternating", "deepseek_v3")])
def test_stacked_layers_give_the_same(family, monkeypatch):
    """Accelerators have stacked layers: there a loop takes weights and entries of the cache out of stacks."""
    run = build.__wrapped__(family)
    monkeypatch.setattr("jaxtrain.hub.decoding._layers_apart", lambda: False)
    found = jt.generate(run, state(run, family), PROMPTS, max_new_tokens=NEW, temperature=1.0, logprobs=True, seed=3)
    check_same(found, continued(family, 1.0))
    found = jt.generate(run, state(run, family), MANY, batch_size=4, **VARIED)
    monkeypatch.undo()
    check_same(found, varied(family))


@pytest.mark.exhaustive
def test_what_follows_a_prompt_does_not_depend_on_the_others_and_compiles_once():
    run, family = build("gpt2"), "gpt2"
    weights, programs = state(run, family), decoding(run)

    def say(prompts, **keys):
        return [one.tokens for one in jt.generate(run, weights, prompts, max_new_tokens=NEW, seed=3, **keys)]

    want = [one.tokens for one in continued(family, 1.0)]
    assert say(PROMPTS, batch_size=1) == want  # of the same places among the prompts
    assert say(PROMPTS[:1]) == want[:1]
    before = programs.prefill_program._cache_size(), programs.go_on_program._cache_size()
    assert say([[1, 2, 3, 4, 5, 6]], temperature=0.5) != say([[1, 2, 3, 4, 5, 6, 7, 8]], temperature=0.7)
    assert (programs.prefill_program._cache_size(), programs.go_on_program._cache_size()) == before
    assert [len(tokens) for tokens in say([[1] * 30, [1] * 31])] == [2, 1]  # as many as there is room for


@pytest.mark.slow
def test_a_row_that_is_finished_stays_as_it_is():
    run, greedy = build("gpt2"), [one.tokens for one in continued("gpt2")]
    end = greedy[0][4]
    for size in (64, 2):  # with two, the last prompt takes the place of the first one
        found = jt.generate(run, state(run, "gpt2"), PROMPTS, max_new_tokens=NEW, temperature=0, stop=[end],
                            batch_size=size)
        for one, whole in zip(found, greedy, strict=True):
            kept = whole[:whole.index(end)] if end in whole else whole
            assert (one.tokens, one.finish_reason) == (kept, "stop" if end in whole else "length")
    assert decoding(run).put_program._cache_size()


# Of lengths that need several widths, and answers of 1 to 24 tokens: any of eight stop tokens of 64 ends one.
MANY = [[(7 * n + k) % 60 + 1 for k in range((1, 5, 3, 8)[n % 4])] for n in range(19)]
VARIED = dict(max_new_tokens=24, seed=5, logprobs=True, stop=list(range(40, 48)))


def counted(monkeypatch, *args, **keys):
    """Return what is generated, and in how many iterations."""
    steps, go_on = [], Decoding.go_on

    def noted(self, params, state, *args):
        after = go_on(self, params, state, *args)
        steps.append(int(after["step"]))
        return after

    with monkeypatch.context() as patched:
        patched.setattr(Decoding, "go_on", noted)
        return jt.generate(*args, **keys), sum(steps)


def check_same(found, want):
    for one, other in zip(found, want, strict=True):
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)
        if other.end:
            assert one.end[0] == other.end[0]
            np.testing.assert_allclose(one.end[1], other.end[1], rtol=1e-5, atol=1e-5)


def iterations(records, size):
    """Return how many iterations batches take of which none is refilled."""
    each = [len(one.tokens) + (one.end is not None) for one in records]
    return sum(max(each[first:first + size]) for first in range(0, len(each), size))


@functools.cache
def varied(family):
    run = build(family)
    return jt.generate(run, state(run, family), MANY, batch_size=32, **VARIED)


@pytest.mark.parametrize("family", [
    *slow("gemma3"), *exhaustive(*(family for family in FAMILIES if family != "gemma3"))])
def test_prompts_that_take_the_places_of_finished_rows_are_continued_as_alone(family, monkeypatch):
    run = build(family)
    held, want = state(run, family), varied(family)
    assert len({len(one.tokens) for one in want}) > 5
    found, steps = counted(monkeypatch, run, held, MANY, batch_size=4, **VARIED)
    check_same(found, want)
    assert iterations(want, 1) / 4 <= steps < 0.8 * iterations(want, 4)
    greedy = VARIED | dict(temperature=0)
    want = jt.generate(run, held, MANY, batch_size=32, **greedy)
    found, steps = counted(monkeypatch, run, held, MANY, batch_size=4, **greedy)
    check_same(found, want)
    assert steps <= iterations(want, 4)


@pytest.mark.exhaustive  # the next test replaces rows on a mesh, too
@pytest.mark.parametrize(("family", "sizes"), [
    ("llama", dict(data=2, tensor=2)), ("deepseek_v3", dict(fsdp=2, tensor=2)),
    ("gemma3", dict(data=2, context=2, tensor=2))], ids=str)
def test_finished_rows_are_replaced_on_a_mesh(family, sizes, monkeypatch):
    run, want = build(family, **{f"mesh__{axis}": size for axis, size in sizes.items()}), varied(family)
    found, steps = counted(monkeypatch, run, state(run, family), MANY, batch_size=4, **VARIED)
    check_same(found, want)
    assert steps < 0.8 * iterations(want, 4)


@pytest.mark.parametrize(("family", "sizes"), [
    *exhaustive(("llama", dict(data=2, tensor=2)), ("mixtral", {}))], ids=str)
def test_stop_strings_in_rows_that_are_replaced(family, sizes, monkeypatch):
    """Stop strings are found on the host, some tokens later."""
    monkeypatch.setattr("jaxtrain.hub.generate.CHUNK", 5)
    keys = VARIED | dict(tokenizer=ByteTokenizer(), stop=["%", "(", "+", 46])
    plain, run = build(family), build(family, **{f"mesh__{axis}": size for axis, size in sizes.items()})
    alone = jt.generate(plain, state(plain, family), MANY, batch_size=1, **keys)
    assert {one.finish_reason for one in alone} == {"stop", "length"}
    assert {one.end is None for one in alone if one.finish_reason == "stop"} == {True, False}
    for size in (3, 32):
        check_same(jt.generate(run, state(run, family), MANY, batch_size=size, **keys), alone)
