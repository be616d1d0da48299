"""Modules called eagerly, as in a notebook: layer by layer, with nothing to compile after the first call."""

import jax
import numpy as np
import pytest

from tests.numerics import reference


@pytest.mark.parametrize("family", [
    "gpt2", "gemma3", *(pytest.param(family, marks=pytest.mark.exhaustive) for family in (
        "llama", "qwen3", "mixtral", "deepseek_v3", "gpt_oss", "alternating"))])
def test_the_second_call_compiles_nothing_and_gives_what_a_compiled_one_gives(family):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if name.endswith("backend_compile_duration") else None)
    run = reference.build(family)
    tokens, state = reference.batch(0)["tokens"], run.init()
    first = run.module(state)(tokens)
    assert compiled, "the listener hears of compilations"
    compiled.clear()
    np.testing.assert_array_equal(run.module(state)(tokens), first)
    assert not compiled
    module = run.module(state)
    want = jax.jit(module.__call__).lower(tokens).compile({"xla_backend_optimization_level": 0})(tokens)
    np.testing.assert_allclose(first, want, rtol=1e-5, atol=1e-5)


def test_an_error_inside_a_layer_is_raised_where_it_happens():
    """In a notebook a layer is plain Python, whose arrays have values."""
    run = reference.build("gpt2")
    module, seen = run.module(run.init()), []
    block = type(module.blocks.layer)

    with pytest.MonkeyPatch.context() as patch:
        call = block.__call__
        patch.setattr(block, "__call__", lambda self, x, *args: (seen.append(float(x.sum())), call(self, x, *args))[1])
        module(reference.batch(0)["tokens"])
    assert len(seen) == run.config.model.num_layers
