"""Texts that join and leave while others are continued are those of `generate`, in rows and in pages, on any mesh."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hub.batching.gumbel import gumbel, largest
from jaxtrain.hub.batching.page_numbers import PageNumbers
from jaxtrain.hub.batching.sampler import FEWEST_ROWS, Sampler
from jaxtrain.hub.batching.texts import keys
from jaxtrain.hub.decoding import Decoding, decoding
from jaxtrain.models.attention.cache_pages import PAGE
from tests.hub.test_decoding import MANY, VARIED, build, check_same, state
from tests.tiers import exhaustive, slow

GROUPS = [prompt for prompt in ([3, 4, 5], list(range(1, 19)), [9] * 16) for _ in range(8)]  # within, over, at a page
ANSWERS = VARIED | dict(max_new_tokens=12)


def in_pages(monkeypatch, family, **sizes):
    """A run whose cache is in pages, as on an accelerator."""
    monkeypatch.setattr("jaxtrain.hub.decoding._layers_apart", lambda: False)
    return build.__wrapped__(family, **{f"mesh__{axis}": n for axis, n in sizes.items()})


def test_prompts_join_while_others_are_continued():
    """In another order, at other times and in other rows than `generate` has them; numbers give keys."""
    run, family = build("gpt2"), "gpt2"
    sampler = Sampler(run, state(run, family), rows=4, ends=VARIED["stop"], logprobs=True)
    words, found, order = keys(VARIED["seed"], [(n, 0) for n in range(len(MANY))]), {}, [*range(len(MANY))][::-1]
    numbers = {}
    while order or sampler.busy:
        for _ in range(3):
            if order:
                number = order.pop(0)
                numbers[sampler.submit(MANY[number], VARIED["max_new_tokens"], words[number])] = number
        sampler.step()
        found |= {numbers[n]: record for n, record in sampler.collect().items()}
    sampler.seed, sampler.asked = VARIED["seed"], 4
    again = sampler.submit(MANY[4], VARIED["max_new_tokens"])
    while sampler.busy:
        sampler.step()
    check_same([sampler.collect()[again]], [found[4]])
    assert not sampler.collect() and len(found) == len(MANY)
    check_same([found[n] for n in range(len(MANY))],
               jt.generate(run, state(run, family), MANY, batch_size=4, **VARIED))


def test_noise_and_its_largest_are_those_of_jax():
    rows = jax.random.split(jax.random.key(7), 5)
    noise = gumbel(rows, 1000)
    np.testing.assert_array_equal(noise, jax.vmap(lambda key: jax.random.gumbel(key, (1000,)))(rows))
    np.testing.assert_array_equal(largest(noise), noise.argmax(-1))
    np.testing.assert_array_equal(largest(np.float32([[1, 3, 3], [-np.inf, -np.inf, -5], [2, 2, 2]])), [1, 2, 0])


def test_pages_are_counted():
    pages = PageNumbers(2)
    assert pages.grown([3, 0]) and pages.size == 4 and not pages.grown([4, 4])
    mine = pages.take(0, 3)
    pages.share(0, mine[:2])
    pages.release(0, mine)
    assert pages.in_use == 2 and pages.most == 3
    assert pages.grown([4, 0]) and pages.size == 8
    theirs = pages.take(0, 6)
    assert not {*theirs} & {*mine[:2]}
    pages.release(0, mine[:2])
    pages.release(0, theirs)
    assert pages.grown([10, 0], 11) and pages.size == 11
    assert not pages.in_use and sorted(pages.free[0]) == [*range(11)] and len(pages.free[1]) == 11


@pytest.mark.slow
def test_equal_prompts_are_computed_once_and_rows_become_fewer(monkeypatch):
    run = build("gpt2")
    rows, prefilled = [], []
    go_on, prefill = Decoding.go_on, Decoding.prefill
    monkeypatch.setattr(Decoding, "go_on", lambda self, params, state, *args: (
        rows.append(len(state["done"])), go_on(self, params, state, *args))[1])
    monkeypatch.setattr(Decoding, "prefill", lambda self, params, prompts, *args: (
        prefilled.append(len(prompts)), prefill(self, params, prompts, *args))[1])
    found = jt.generate(run, state(run, "gpt2"), GROUPS, **ANSWERS)
    assert prefilled == [4] and rows[0] == 32 and rows[-1] == FEWEST_ROWS and rows == sorted(rows)[::-1]
    alone = jt.generate(run, state(run, "gpt2"), GROUPS, **ANSWERS, batch_size=2)
    check_same(found, alone)


@pytest.mark.parametrize(("family", "sizes"), [
    *slow(("gpt2", {})), *exhaustive(
        ("llama", dict(data=2, tensor=2)), ("deepseek_v3", dict(fsdp=2, tensor=2)), ("gpt_oss", {}),
        ("gemma3", dict(data=2, context=2, tensor=2)))], ids=str)
def test_pages_give_what_rows_give(family, sizes, monkeypatch):
    """Answers to one prompt share its whole pages; each has its own copy of the last one."""
    plain = build(family)
    want = jt.generate(plain, state(plain, family), GROUPS, **ANSWERS)
    run, most = in_pages(monkeypatch, family, **sizes), []
    release = PageNumbers.release
    monkeypatch.setattr(PageNumbers, "release", lambda self, *args: (most.append(self.most), release(self, *args))[1])
    for size in (64, 4):
        check_same(jt.generate(run, state(run, family), GROUPS, **ANSWERS, batch_size=size), want)
    assert "table" not in Sampler(plain, state(plain, family)).state and decoding(run).store_program._cache_size()
    alone = sum(-(-(len(prompt) + 12) // PAGE) for prompt in GROUPS)
    assert max(most) <= alone - (0 if sizes else 7 * 2)  # two prompts have a whole page
