"""Each rematerialisation policy saves the memory it is meant to save. That none changes a number: test_equality.py."""

import functools

import pytest

from tests.numerics import reference
from tests.tiers import exhaustive, slow

# Deep and with a long sequence: what layers keep for the backward pass outweighs everything else.
SHAPE = dict(model__num_layers=12, model__max_seq_len=64, data__seq_len=64, data__global_batch_size=4)
LAYERS, ROWS, SEQ, DIM, HEADS, MLP, F32 = 12, 4, 64, 32, 8, 128, 4


@functools.cache
def temporary(policy, unroll=1):
    """Bytes that the compiled step needs beside its arguments and results."""
    compiled = reference.compiled(reference.build("gpt2", train__remat=policy, train__unroll=unroll, **SHAPE))
    return compiled.memory_analysis().temp_size_in_bytes


# What a layer then computes again and need not keep: the scores of all pairs with every policy; further the results
# of matmuls, except for the attention's where it is kept by name.
SCORES = LAYERS * ROWS * HEADS * SEQ * SEQ * F32
TOKENS = LAYERS * ROWS * SEQ * F32


@pytest.mark.parametrize(("policy", "unroll"), [
    *slow(("full", 2)),
    *exhaustive(("attention_and_dots", 1), ("full", 1), ("dots", 1), ("attention", 1), ("full", 0))])
def test_policy_saves_at_least_the_attention_scores(policy, unroll):
    """It does so without a loop too, where a compiler would merge both equal computations into one."""
    saved = temporary("none", unroll) - temporary(policy, unroll)
    assert saved > 0.8 * SCORES, f"{policy} saves {saved:,} bytes; the scores alone are {SCORES:,}"


@pytest.mark.exhaustive
def test_policies_keep_what_they_name():
    """Each keeps more than the one before: nothing, attention's output, matmuls' results, both."""
    full, attention, dots, both = map(temporary, ("full", "attention", "dots", "attention_and_dots"))
    kept = TOKENS * DIM  # attention's output
    # On JAX 0.10 tests compile without XLA's scheduler for concurrency (tests/tiny.py), and 1.9 times as much is alive.
    assert 0.7 * kept < attention - full < 2 * kept, f"it keeps {attention - full:,} more than full, not {kept:,}"
    assert 0.7 * kept < both - dots < 1.5 * kept, f"both keep {both - dots:,} bytes more than dots, not {kept:,}"
    matmuls = TOKENS * (5 * DIM + MLP)  # q, k, v, out, down and up
    assert 0.6 * matmuls < dots - full < 1.2 * matmuls, f"dots keeps {dots - full:,} more than full, not {matmuls:,}"
