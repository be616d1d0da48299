"""Histograms on a mesh are those that NumPy counts on one device, to the last number."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.observe.trackers import histograms


def plain(x):
    x = np.asarray(x, np.float32)
    x = x[np.isfinite(x)]
    share = np.arange(histograms.BINS + 1, dtype=np.float32) / np.float32(histograms.BINS)
    least, most = (x.min(), x.max()) if x.size else (np.float32(0), np.float32(0))
    edges = least * (1 - share) + most * share
    below = [int((x < edge).sum()) for edge in edges[1:-1]]
    return np.diff([0, *below, x.size]), edges


def test_any_mesh_same_counts():
    rng = np.random.default_rng(0)
    arrays = {"a": rng.normal(size=(8, 16, 4)).astype(np.float32), "b": {"c": rng.normal(size=64).astype(np.float32)},
              "bf16": np.asarray(jnp.asarray(rng.normal(size=(8, 8)), jnp.bfloat16)), "tokens": np.arange(8)}
    arrays["a"][0, 0, :3] = np.nan, np.inf, -np.inf
    specs = {"a": P("fsdp", "tensor"), "b": {"c": P(("fsdp", "tensor"))}, "bf16": P(None, "tensor"), "tokens": P()}
    for kind in (AxisType.Explicit, AxisType.Auto):
        for shape in ((1, 1), (2, 2)):
            mesh = jax.make_mesh(shape, ("fsdp", "tensor"), (kind, kind), devices=jax.devices()[:shape[0] * shape[1]])
            placed = jax.tree.map(lambda x, spec, m=mesh: jax.device_put(x, NamedSharding(m, spec)), arrays, specs)
            found = histograms.read(histograms.histograms(placed, mesh))
            assert found.keys() == {"a", "b/c", "bf16"}
            for path, x in (("a", arrays["a"]), ("b/c", arrays["b"]["c"]), ("bf16", arrays["bf16"])):
                counts, edges = plain(x)
                np.testing.assert_array_equal(found[path][0], counts)
                np.testing.assert_allclose(found[path][1], edges, rtol=1e-6, atol=1e-7)
    assert found["a"][0].sum() == arrays["a"].size - 3


def test_arrays_without_a_spread_or_without_numbers():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    found = histograms.read(histograms.histograms({"same": jnp.full(5, 2.0), "nan": jnp.full(3, jnp.nan)}, mesh))
    assert found["same"][0].tolist() == [0] * (histograms.BINS - 1) + [5] and found["nan"][0].sum() == 0
