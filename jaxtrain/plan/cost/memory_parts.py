"""Name the arrays that are live at the peak of a program in the user's terms."""

from collections import Counter
from collections.abc import Mapping, Sequence

import jax

from jaxtrain.base.annotations import PyTree
from jaxtrain.plan.cost.memory import Peak
from jaxtrain.plan.trace.program import Value

COPY, CACHE, LOGITS = "weights laid out", "key-value cache", "logits"  # while prompts are answered


def named(worst: Peak, params: PyTree, others: Mapping[tuple[int, ...], str] | None = None,
          handed_on: Sequence[str] = ("gradients",)) -> Counter:
    """Return the bytes of each kind of array.

    Args:
        params: the parameters, by whose shapes gradients and copies are known.
        others: the names of arrays with further shapes.
        handed_on: the names of what loops update in place, from which what is counted twice is taken.
    """
    shapes = {leaf.shape for leaf in jax.tree.leaves(params)}
    layers = {shape[1:] for shape in shapes if len(shape) > 1}
    found: Counter = Counter()
    for value in worst.values:
        found[(others or {}).get(value.shape) or _name(value, shapes, layers)] += value.bytes
    rest = worst.bytes - found.total()  # below 0 where a loop hands on what is updated in place
    for name in handed_on[:-1]:
        taken = max(rest, -found[name]) if rest < 0 else 0
        found[name], rest = found[name] + taken, rest - taken
    found["working memory" if rest >= 0 else handed_on[-1]] += rest
    return found


def _name(value: Value, shapes: set[tuple[int, ...]], layers: set[tuple[int, ...]]) -> str:
    made = value.op.name if value.op else ""
    if made == "device_put":
        return "optimizer's pieces"
    if value.shape in shapes:
        return "weights in use" if made == "convert_element_type" else "gradients"
    if value.shape in layers and made in ("reshard", "all_gather"):
        return "gathered weights"
    return "saved activations" if made == "scan" else "working memory"
