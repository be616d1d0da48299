"""The communication between devices in one step, to the byte, and the operations that the compiled step may hold.

Each mesh has a closed form from the model's shapes; a collective that nobody asked for fails here and is printed. This
is XLA for CPU, where a sum whose result is then split stays an all-reduce (accelerators make it a reduce-scatter) and
where collectives carry float32 for float32 models. Bytes are those of the result on one device, times executions.

Letters: B examples on one device, T sequence, D embedding, V vocabulary, L layers, A = one activation [B, T, D].
"""

import functools
import logging
import math
import re

import jax
import numpy as np
import pytest

from jaxtrain.plan import hlo
from tests.numerics import reference
from tests.tiers import exhaustive, slow

F32 = 4
SHAPE = dict(model__vocab_size=512, model__num_layers=3, model__embed_dim=64, model__max_seq_len=32, data__seq_len=32,
             data__global_batch_size=16)
FSDP, TENSOR, BOTH, CUBE, DATA = (1, 8, 1), (1, 1, 8), (1, 2, 2), (2, 2, 2), (8, 1, 1)


@functools.cache
def step(family, mesh, **keys):
    """A run, its compiled step, and the collectives in it."""
    run = reference.build(family, mesh, **(SHAPE | keys))
    compiled = reference.compiled(run)
    return run, compiled, hlo.collectives(compiled.as_text())


def parameters(run):
    """Return for each parameter: path, whether a layer's, bytes in use on a device, whether fsdp splits it at rest."""
    sizes = run.mesh.shape
    leaves = jax.tree_util.tree_flatten_with_path(run.abstract.params)[0]
    names = jax.tree.structure(run.abstract.params).flatten_up_to(run.layout.axes)
    for (path, leaf), axes in zip(leaves, names, strict=True):
        # fsdp_tp in words: embed and norm dimensions over fsdp, heads, mlp and vocabulary over tensor.
        tensor = sizes["tensor"] if {"heads", "kv_heads", "mlp", "vocab"} & set(axes) else 1
        fsdp = sizes["fsdp"] > 1 and bool({"embed", "norm"} & set(axes))
        yield jax.tree_util.keystr(path, simple=True, separator="/"), "layers" in axes, leaf.size * F32 // tensor, fsdp


def expected(run):
    """Bytes of all-gather, all-reduce and reduce-scatter in one step."""
    c, t, sizes = run.config.model, run.config.train, run.mesh.shape
    fsdp, tensor, shards = sizes["fsdp"], sizes["tensor"], sizes["data"] * sizes["fsdp"]
    L, D, K = c.num_layers, c.embed_dim, c.head_dim
    tokens = run.config.data.global_batch_size * run.config.data.seq_len // shards // t.accumulation
    A, table = tokens * D * F32, c.vocab_size * D * F32 // tensor
    tied = c.tied_embeddings
    gather = reduce = scatter = 0

    if fsdp > 1:  # every weight is gathered for the forward pass; a layer's again where that is computed again
        again = 2 if t.remat != "none" else 1
        gather += sum(size * (again if layer else 1) for _, layer, size, split in parameters(run) if split)
        gather += table if tied else 0  # once to look up, once as the head
        # The gradients of the lookup and the head are summed directly into the pieces that devices hold, then over
        # `data`.
        scatter += 2 * (table // fsdp)
        reduce += 2 * ((table // fsdp if sizes["data"] > 1 else 0) - table)
    if shards > 1:  # every gradient is summed over the batch's devices; a tied table's twice: as a lookup and as a head
        reduce += sum(size for *_, size, _ in parameters(run)) + (table if tied else 0)
    if tensor > 1:
        # Each layer, forward: the sequence is gathered at the entrance of attention and MLP, and summed at their exits.
        # Backward: the same, mirrored; one sum an entrance, however many matmuls share it (q, k, v; gate, up).
        gather += L * 4 * A
        reduce += L * (2 + 2) * A
        # The end of the stack is gathered for the head, whose input gradient is summed. The lookup sums and splits its
        # rows in one; its gradient is gathered, once for learned positions too.
        gather += A + A
        reduce += A
        scatter += A // tensor
        # Scales and biases between blocks are whole on each device and see a part of the sequence.
        ends = ("norm/scale", "norm/bias", "out/bias", "down/bias")
        reduce += sum(size for path, _, size, _ in parameters(run) if path.endswith(ends))
        # The partition function's maximum and sum, and the correct logit: one number for each token.
        reduce += 3 * tokens * F32
        if c.name == "qwen3":  # its norms of queries and keys are whole and see a part of the heads
            reduce += 2 * L * K * F32
    once = {"all-gather": gather, "all-reduce": reduce, "reduce-scatter": scatter,
            "all-to-all": 0, "collective-permute": 0}
    return {kind: size * t.accumulation for kind, size in once.items()}  # in every micro-batch


CASES = [
    ("gpt2", CUBE, {}),
    *slow(("gpt2", DATA, dict(train__accumulation=2)), ("llama", BOTH, {}), ("qwen3", CUBE, {}),
          ("gpt2", FSDP, dict(train__remat="full"))),
    *exhaustive(("gpt2", DATA, {}), ("gpt2", FSDP, {}), ("gpt2", TENSOR, {})),
]


def name(value):
    if isinstance(value, dict):
        value = value.values()
    return value if isinstance(value, str) else "-".join(map(str, value)) or "plain"


@pytest.mark.parametrize(("family", "mesh", "keys"), CASES, ids=name)
def test_collectives_are_those_of_the_closed_form(family, mesh, keys):
    run, _, found = step(family, mesh, **keys)
    for kind, want in expected(run).items():
        got = hlo.total(found, kind)
        # 2 %, and the scalars: the norm of each gradient, the loss and its weight.
        assert abs(got - want) <= 0.02 * want + 1024, (
            f"{kind}: {got:,} bytes on each device, {got - want:+,} against the closed form\n{hlo.table(found)}")


@pytest.mark.parametrize(("family", "mesh", "keys"), CASES, ids=name)
def test_nothing_is_gathered_but_weights_and_the_sequence_at_the_entrances(family, mesh, keys):
    run, _, found = step(family, mesh, **keys)
    c, sizes = run.config, run.mesh.shape
    rows = c.data.global_batch_size // sizes["data"] // sizes["fsdp"]
    allowed = {(rows, c.data.seq_len, c.model.embed_dim)} if sizes["tensor"] > 1 else set()
    names = jax.tree.structure(run.abstract.params).flatten_up_to(run.layout.axes)
    for leaf, axes in zip(jax.tree.leaves(run.abstract.params), names, strict=True):
        cut = {axis: sizes["tensor"] for axis in ("heads", "kv_heads", "mlp", "vocab")}
        shape = tuple(n // cut.get(axis, 1) for n, axis in zip(leaf.shape, axes, strict=True) if axis != "layers")
        matrices = {(math.prod(shape[:d]), math.prod(shape[d:])) for d in range(1, len(shape))}
        allowed |= {shape, shape[::-1], *matrices}  # a tied table is transposed for the head
    for collective in (c for c in found if c.kind == "all-gather"):
        for _, shape in collective.arrays:
            assert shape in allowed, f"gathered, but neither a weight nor [batch, sequence, embed]: {collective}"


def test_weights_are_gathered_in_the_dtype_they_compute_in():
    """Seen before the compiler for CPU, which computes bfloat16 sums in float32, has its way."""
    run = reference.build("gpt2", FSDP, **SHAPE, train__precision="bfloat16")
    D, F = run.config.model.embed_dim, run.config.model.mlp_dim
    whole = rf"sharding_constraint %\w+ <@mesh, \[\{{\}}, \{{\}}\]> : tensor<{D}x{F}x(\w+)>"
    dtypes = re.findall(whole, run.lower().as_text())
    assert dtypes and set(dtypes) == {"bf16"}, f"a weight of the MLP is gathered as {dtypes or 'nothing'}, not bfloat16"


@pytest.mark.parametrize(("family", "mesh", "keys"), CASES, ids=name)
def test_all_of_the_state_is_donated(family, mesh, keys):
    run, compiled, _ = step(family, mesh, **keys)
    leaves = jax.tree.leaves(run.abstract)
    state = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    alias = compiled.memory_analysis().alias_size_in_bytes
    assert alias == state, f"{state - alias:,} of {state:,} bytes of state on each device are not updated in place"


def test_one_run_compiles_its_step_once(caplog):
    """Whether batches come from the host or the device, and states from outside or from a step."""
    run = reference.build("gpt2", CUBE)
    state = reference.start(run)
    placed = run.sharded.place(reference.batch(1))
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        state, _ = run.step(state, reference.batch(0))
        first = compilations(caplog)
        assert [n for n in first if "step" in n], f"the first step was not seen to compile: {first}"
        caplog.clear()
        for batch in (placed, reference.batch(2), jax.device_put(reference.batch(3), run.layout.batch(2))):
            state, metrics = run.step(state, batch)
            jax.device_get(metrics)
    assert compilations(caplog) == [], "something compiled again after the first step"
    assert len([n for n in first if "step" in n]) == 1, f"the step compiled more than once: {first}"
    assert int(state.step) == 4 and np.isfinite(float(metrics["loss"]))


def compilations(caplog):
    return [record.getMessage() for record in caplog.records if "Finished XLA compilation" in record.getMessage()]
