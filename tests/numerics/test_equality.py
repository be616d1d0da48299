"""Any mesh, same numbers: training on every factorisation of 8 devices against plain training on one, written apart.

A few steps of three cases are quick, 20 steps of two others slow, and of all cases exhaustive.
Loss of every step and gradients of the first, within 1e-5 relative in float32. What may not change them: data, fsdp and
tensor parallelism, the ZeRO stage, accumulation, scanned or unrolled layers, rematerialisation, chunks of the loss.
"""

import itertools
import random

import jax
import numpy as np
import pytest

from tests.numerics import reference
from tests.tiers import exhaustive, slow, slow_if

# The others have some meshes of their own.
DEALT = tuple(family for family in reference.FAMILIES if family not in ("qwen2", "olmo2"))
REMAT = ("none", "full", "dots", "attention", "attention_and_dots")


def cases():
    """Every mesh x ZeRO stage x accumulation x scan; family, remat and chunks dealt out evenly, always alike."""
    every = [(mesh, zero, accumulation, unroll) for mesh in reference.EIGHT for zero in range(4 if mesh[0] > 1 else 1)
             for accumulation, unroll in itertools.product((1, 4), (1, 0))]
    deal = random.Random(0)
    columns = []
    for values in (DEALT, REMAT, (0, 4)):
        column = list(itertools.islice(itertools.cycle(values), len(every)))
        deal.shuffle(column)
        columns.append(column)
    return [(*case, *dealt) for case, *dealt in zip(every, *columns, strict=True)]


def some(every):
    """Return one case of each mesh, spread over the other choices."""
    chosen = []
    for i, mesh in enumerate(reference.EIGHT, 2):
        own = [case for case in every if case[0] == mesh]
        chosen.append(own[(4 * (i % 4) + (i + 1) % 4) % len(own)])
    return chosen


CASES = cases()
ONE_EACH = some(CASES)
QUICK = [case for case in ONE_EACH if case[0] in ((2, 1, 4), (2, 2, 2), (4, 1, 2))]
SLOW = [case for case in ONE_EACH if case[0] in ((8, 1, 1), (2, 4, 1))]
# Other tests of the quick and slow tiers have these: models/test_gemma3.py, and those that leave the keys as they are.
ELSEWHERE = (("family", "gemma3"), ("remat", "none"), ("zero stage", 0))
FEW = 5  # steps


def name(case):
    (data, fsdp, tensor), zero, accumulation, unroll, family, remat, chunks = case
    return (f"{family}-data{data}-fsdp{fsdp}-tensor{tensor}-zero{zero}-accumulate{accumulation}-"
            f"{'scan' if unroll else 'unrolled'}-remat_{remat}-chunks{chunks}")


@pytest.mark.parametrize("case", QUICK, ids=name)
def test_any_mesh_gives_the_numbers_of_one_device(case):
    check(case, FEW)


def check(case, steps=reference.STEPS):
    mesh, zero, accumulation, unroll, family, remat, chunks = case
    run = reference.build(family, mesh, optimizer__zero_stage=zero, train__accumulation=accumulation,
                          train__unroll=unroll, train__remat=remat, train__loss_chunks=chunks)
    reference.check(run, family, steps)


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=slow_if(case in SLOW)) for case in ONE_EACH], ids=name)
def test_any_mesh_gives_the_numbers_of_one_device_for_20_steps(case):
    check(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [case for case in CASES if case not in SLOW], ids=name)
def test_any_mesh_gives_the_numbers_of_one_device_everywhere(case):
    check(case)


@pytest.mark.parametrize("layers", [
    *exhaustive(4, 5)])
def test_layers_unrolled_in_twos_give_the_numbers_of_one_device(layers):
    """The mesh is one where activations are typed `reduced`; five layers leave a rest."""
    reference.check(reference.build("gpt2", (1, 1, 2), train__unroll=2, model__num_layers=layers), "gpt2", steps=2)


@pytest.mark.parametrize(("family", "mesh", "keys"), [
    *slow(("llama", (2, 2, 2), dict(train__remat="full:1,attention+mlp@host", train__accumulation=2)),
          ("llama", (1, 1, 2), dict(train__remat="heads+mlp@host", mesh__stage=2, pipeline__schedule="zb_h1"))),
    *exhaustive(("gpt2", (1, 1, 4), dict(train__remat="embed+mlp:1,none", train__precision="float32")),
                ("deepseek_v3", (2, 2, 2), dict(train__remat="latent+heads@host")),
                ("gemma3", (1, 1, 1), dict(train__remat="full:1,heads@host", mesh__context=4)),
                ("mixtral", (1, 2, 1), dict(train__remat="attention:1,attention_and_dots", mesh__expert=4)))], ids=str)
def test_what_is_kept_by_name_and_by_layer_changes_no_number(family, mesh, keys):
    steps = reference.STEPS if family == "deepseek_v3" else FEW  # the routers' biases take more to follow the load
    reference.check(reference.build(family, mesh, **keys), family, steps)


@pytest.mark.exhaustive  # on meshes and, a step of it, in test_step.py they are in the other tiers
@pytest.mark.parametrize("family", reference.FAMILIES)
def test_one_device_gives_the_numbers_of_the_plain_model(family):
    reference.check(reference.build(family), family)


@pytest.mark.parametrize(("mesh", "keys"), [
    *exhaustive(((2, 2, 2), dict(train__accumulation=2)), ((1, 1, 8), dict(train__remat="dots")),
                ((1, 1, 2), dict(mesh__stage=2, mesh__context=2, pipeline__schedule="zb_h1")))], ids=str)
def test_biases_of_queries_keys_and_values_on_a_mesh(mesh, keys):
    reference.check(reference.build("qwen2", mesh, **keys), "qwen2", FEW)


@pytest.mark.parametrize(("mesh", "keys"), [
    *slow(((2, 2, 2), dict(train__remat="dots")), ((1, 1, 8), dict(train__accumulation=2))),
    *exhaustive(((1, 1, 2), dict(mesh__stage=2, mesh__context=2, pipeline__schedule="zb_h1")))], ids=str)
def test_norms_of_all_heads_together_on_a_mesh_that_splits_them(mesh, keys):
    reference.check(reference.build("olmo2", mesh, **keys), "olmo2", FEW)


@pytest.mark.parametrize(("cases", "number", "least"), [
    pytest.param(QUICK, 3, 0, id="quick"), pytest.param(QUICK + SLOW, 5, 1, id="slow"),
    pytest.param(CASES, 10, 6, id="all")])
def test_the_cases_cover_every_choice_on_several_meshes(cases, number, least):
    assert len({case[0] for case in cases}) == number and len(reference.EIGHT) == 10
    for column, what in enumerate(("zero stage", "accumulation", "unroll", "family", "remat", "chunks"), 1):
        meshes = {case[column]: set() for case in CASES}
        for case in cases:
            meshes[case[column]].add(case[0])
        least_of_all = least or what not in ("family", "remat", "zero stage")  # three cases cannot have all
        few = {value: len(on) for value, on in meshes.items() if len(on) < least_of_all
               and (cases is CASES or (what, value) not in ELSEWHERE)}
        assert not few, f"these values of {what} occur on too few meshes: {few}"


@pytest.mark.parametrize("mesh", [
    (2, 2, 2), *exhaustive(*((mesh,) for mesh in reference.EIGHT if mesh != (2, 2, 2)))], ids=str)
def test_initial_values_do_not_depend_on_the_mesh(mesh):
    """They are equal to the last bit, laid out as the state is from the start, and compiled as users compile them."""
    run = reference.build("gpt2", mesh, optimizer__zero_stage=3)
    state = run.init()
    leaves = jax.tree_util.tree_flatten_with_path(state.params)[0]
    wanted = jax.tree.leaves(reference.initial("gpt2")), jax.tree.leaves(run.layout.state.params)
    for (path, got), want, where in zip(leaves, *wanted, strict=True):
        assert np.array_equal(np.asarray(got), want), f"{jax.tree_util.keystr(path)} starts with other values"
        assert got.sharding.is_equivalent_to(where, got.ndim), f"{jax.tree_util.keystr(path)} starts in another place"
