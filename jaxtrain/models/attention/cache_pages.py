"""The key-value cache in pages, of which each row of a batch has those that its text needs: arrays [N, G, P, K].

A table says which pages a row has, in the order of its text (PagedAttention; Kwon et al., 2023, arXiv 2309.06180). On a
mesh each device has pages of its own rows, and the table numbers those. A number that is too large stands for no page:
nothing is written there, and what is read there, no token attends to.

Shape suffixes: L layers, B rows, N pages, G key/value heads, P slots of a page, K head width, W pages of a row.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import PyTree
from jaxtrain.sharding import activations

PAGE = 16  # slots
NONE = 2**30  # the number of no page


def gathered(table_BW: jax.Array, pages_NGPK: jax.Array) -> jax.Array:
    """Return what rows have in a layer, [B, G, W P, K]."""
    def local(table_BW, pages_NGPK):
        x_BWGPK = jnp.take(pages_NGPK, table_BW, axis=0, mode="clip")
        B, W, G, P, K = x_BWGPK.shape
        return x_BWGPK.transpose(0, 2, 1, 3, 4).reshape(B, G, W * P, K)

    return locally(local, (pages_NGPK,), table_BW)


def written(table_BW: jax.Array, slot_B: jax.Array, pages_LNGPK: jax.Array, new_LBG1K: jax.Array) -> jax.Array:
    """Return the pages of all layers with what each row has in its next slot."""
    def local(table_BW, slot_B, pages_LNGPK, new_LBG1K):
        N, _, P = pages_LNGPK.shape[1:4]
        page_B1 = jnp.take_along_axis(table_BW, slot_B[:, None] // P, 1, mode="fill", fill_value=NONE)
        return pages_LNGPK.at[:, jnp.minimum(page_B1[:, 0], N), :, slot_B % P].set(
            jnp.moveaxis(new_LBG1K[..., 0, :], 1, 0), mode="drop")

    return locally(local, (pages_LNGPK, new_LBG1K), table_BW, slot_B)


def stored(table_BW: jax.Array, pages_LNGPK: jax.Array, texts_LBGSK: jax.Array) -> jax.Array:
    """Return the pages with those of whole texts, of which the table says where."""
    def local(table_BW, pages_LNGPK, texts_LBGSK):
        L, _, G, P, K = pages_LNGPK.shape
        B, W = table_BW.shape
        new = texts_LBGSK.reshape(L, B, G, W, P, K).transpose(0, 1, 3, 2, 4, 5).reshape(L, B * W, G, P, K)
        return pages_LNGPK.at[:, table_BW.ravel()].set(new, mode="drop")

    return locally(local, (pages_LNGPK, texts_LBGSK), table_BW)


def copied(pairs_M2: jax.Array, pages_LNGPK: jax.Array) -> jax.Array:
    """Return the pages with copies: of each pair, the second becomes the first."""
    def local(pairs_M2, pages_LNGPK):
        return pages_LNGPK.at[:, pairs_M2[:, 1]].set(jnp.take(pages_LNGPK, pairs_M2[:, 0], axis=1, mode="clip"),
                                                     mode="drop")

    return locally(local, (pages_LNGPK,), pairs_M2)


def more(pages_LNGPK: jax.Array, parts: int, many: int) -> jax.Array:
    """Return the pages and further ones, so many on each of the parts that the mesh cuts a batch into."""
    def local(pages_LNGPK):
        return jnp.pad(pages_LNGPK, [(0, 0), (0, many - pages_LNGPK.shape[1])] + [(0, 0)] * 3)

    assert pages_LNGPK.shape[1] <= parts * many
    return locally(local, (pages_LNGPK,))


def locally(f: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], *by_row: jax.Array) -> PyTree:
    """Apply a function to what each device has of numbers of rows and of arrays; the result is laid out as the first.
    """
    rows = activations.activation_spec("batch")
    if rows is None:
        return f(*by_row, *arrays)
    specs = tuple(jax.typeof(x).sharding.spec for x in arrays)
    return activations.manual_region(f, in_specs=(*[rows] * len(by_row), *specs), out_specs=specs[0])(*by_row, *arrays)
