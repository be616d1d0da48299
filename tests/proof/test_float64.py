"""A traced program in float64 has the numbers of NumPy's float64, whatever it is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.proof import float64


def both(function, *args):
    """Return the result of a function in float32, and of its jaxpr in float64."""
    closed = jax.make_jaxpr(function)(*args)
    with jax.enable_x64(True):
        (wide,) = jax.device_get(jax.jit(float64.in_float64(closed))(*float64.widened(args)))
    return np.asarray(function(*args)), wide


def in_loops(x):
    total, each = jax.lax.scan(lambda c, row: (c + jnp.sin(row).sum(), c * row), jnp.float32(0), x)
    _, grown = jax.lax.while_loop(lambda pair: pair[0] < 3, lambda pair: (pair[0] + 1, pair[1] * 1.1), (0, total))
    return grown + jax.lax.cond(total > 0, lambda: each.sum(), lambda: each.max()) + jax.jit(jnp.cumsum)(x[0])[-1]


def in_loops_of_numpy(x):
    x = x.astype(np.float64)
    total, each = 0.0, []
    for row in x:
        each.append(total * row)
        total += np.sin(row).sum()
    return total * np.float64(np.float32(1.1)) ** 3 + (np.sum(each) if total > 0 else np.max(each)) + x[0].sum()


def test_loops_and_branches_have_the_numbers_of_numpy():
    x = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    narrow, wide = both(in_loops, x)
    assert wide.dtype == np.float64
    assert wide == pytest.approx(in_loops_of_numpy(x), rel=1e-14) and narrow == pytest.approx(wide, rel=1e-5)
    assert narrow != wide, "float32 rounds, or this shows nothing"


@jax.custom_vjp
def cubed(x):
    return x**3


cubed.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x**2 * g,))


def test_gradients_gathers_and_scatters_are_followed():
    x, at = np.random.default_rng(1).normal(size=9).astype(np.float32), np.array([0, 3, 3, 8])

    def loss(x):
        return (jax.nn.logsumexp(cubed(x[at]).astype(jnp.bfloat16).astype(jnp.float32)) + jax.checkpoint(jnp.tanh)(
            x).sum() ** 2)

    _, wide = both(jax.grad(loss), x)
    y = x.astype(np.float64)
    e = np.exp(y[at] ** 3)
    want = 2 * np.tanh(y).sum() * (1 - np.tanh(y) ** 2)
    np.add.at(want, at, e / e.sum() * 3 * y[at] ** 2)
    np.testing.assert_allclose(wide, want, rtol=1e-12)  # not rounded to bfloat16 between


def test_random_numbers_are_those_of_the_program():
    narrow, wide = both(lambda seed: jax.random.normal(jax.random.key(seed), (50,)), np.int32(3))
    np.testing.assert_allclose(wide, narrow, rtol=2e-5, atol=1e-6)


def test_an_operation_without_a_meaning_in_float64_is_named():
    def called(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), jnp.float32), x)

    with pytest.raises(float64.NoFloat64, match="pure_callback"):
        both(called, np.float32(1))


def test_complex_numbers_have_two_halves_of_float64():
    x = np.random.default_rng(2).normal(size=(4, 8)).astype(np.float32)
    _, wide = both(jax.grad(lambda x: (jnp.abs(jnp.fft.fft(x) * (2 + 1j)) ** 3).sum()), x)
    f = np.exp(-2j * np.pi * np.outer(np.arange(8), np.arange(8)) / 8) * (2 + 1j)  # the transform, written out
    y = x.astype(np.float64) @ f.T
    want = 3 * (np.abs(y)[..., None] * (np.conj(y)[..., None] * f).real).sum(1)
    assert wide.dtype == np.float64
    np.testing.assert_allclose(wide, want, rtol=1e-11)
    assert both(lambda x: x * np.complex64(1j), x)[1].dtype == np.complex128
    assert both(lambda x: 1j * x, x.astype(np.complex64))[1].dtype == np.complex128


def test_linear_solves_and_their_gradients_are_those_of_numpy():
    x = np.random.default_rng(3).normal(size=(5, 5)).astype(np.float32) + 3 * np.eye(5, dtype=np.float32)
    _, wide = both(jax.grad(lambda x: jnp.linalg.solve(x, jnp.ones(5)).sum()), x)
    y = x.astype(np.float64)
    np.testing.assert_allclose(wide, -np.outer(np.linalg.solve(y.T, np.ones(5)), np.linalg.solve(y, np.ones(5))),
                               rtol=1e-10)
    _, wide = both(lambda x: jax.lax.custom_linear_solve(
        lambda v: x @ v, x[0], lambda of, b: jax.scipy.sparse.linalg.gmres(of, b, tol=0.0)[0]), x)
    np.testing.assert_allclose(wide, np.linalg.solve(y, y[0]), rtol=1e-10)


@pytest.mark.parametrize("hidden", [lambda inner: (inner,), lambda inner: {"a": [inner]}])
def test_a_function_in_a_parameter_of_an_unknown_operation_is_found(hidden):
    closed = jax.make_jaxpr(jnp.sin)(1.0)
    eqn = closed.jaxpr.eqns[0]
    with pytest.raises(float64.NoFloat64, match="sin"):
        float64.result_of(eqn.replace(params=eqn.params | {"functions": hidden(closed)}), jnp.ones(()))


def test_an_operation_that_refuses_or_ignores_wider_numbers_is_named(monkeypatch):
    for rule in (lambda eqn, x: x.astype(np.float32), lambda eqn, x: jax.lax.add(x, np.float32(1))):
        monkeypatch.setitem(float64._RULES, "sin", rule)
        with pytest.raises(float64.NoFloat64, match="sin"):
            both(jnp.sin, np.float32(1))
