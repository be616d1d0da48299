"""Tensors that transformers joins in memory, apart again: some folders have them joined where others have each.

Of a layer's experts, those of a matrix are one after the other in `experts.down_proj`, or in `experts.up_proj` where
they have no gates, and in `experts.gate_up_proj` each one's gate is before the matrix beside it. In `conv1d.weight` the
convolutions of queries, keys and values are one after the other. So each part is a stretch of the file.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from jaxtrain.errors import UserError
from jaxtrain.hub.weights.safetensors_files import Tensor

_EXPERT, _CONVOLUTION = re.compile(r"(.*\.experts)\.(\d+)\.\w+\.weight"), re.compile(r"(.*)\.([qkv])_conv1d\.weight")


def apart(folder: object, tensors: Mapping[str, Tensor],
          declared: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Return the tensors, with those that a joined one has in its place; raises UserError where they do not fit.

    `declared`: path of the parameter, name and shape of each tensor that a model has.
    """
    found, parts = dict(tensors), defaultdict(list)
    for path, name, shape in declared:
        for joined, at in _joined(path, name):
            if joined in tensors:
                parts[joined].append((at, name, shape))
    for joined, each in parts.items():
        whole, first = found.pop(joined), 0
        wanted = _whole_shape([shape for _, _, shape in each], len({at[0] for at, _, _ in each}))
        if whole.shape != wanted:
            raise UserError(f"{folder}", f"tensor {joined} has the shape {list(whole.shape)} where the model needs "
                            f"{list(wanted)}", "give the config that its config.json describes")
        for _, name, shape in sorted(each):
            if name in tensors:
                raise UserError(f"{folder}", f"it has both {joined} and {name}, which are the same weights",
                                "download it again")
            found[name] = whole.part(first, shape)
            first += math.prod(shape)
    return found


def _joined(path: str, name: str) -> list[tuple[str, tuple[int, int]]]:
    """Return the joined tensors that may have one, and which expert, and which matrix of its, or which rows it is."""
    if found := _EXPERT.fullmatch(name):
        matrix, (stem, expert) = path.rpartition("/")[2], found.groups()
        both = [(f"{stem}.gate_up_proj", (int(expert), int(matrix == "up")))] if matrix in ("gate", "up") else []
        return [*both, *[(f"{stem}.{matrix}_proj", (int(expert), 0))] * (matrix != "gate")]
    if found := _CONVOLUTION.fullmatch(name):
        return [(f"{found[1]}.conv1d.weight", (0, "qkv".index(found[2])))]
    return []


def _whole_shape(shapes: list[tuple[int, ...]], experts: int) -> tuple[int, ...]:
    """Return the shape of the tensor that has those of these shapes; of one expert: of convolutions."""
    rows = sum(shape[0] for shape in shapes) // experts
    return ((experts,) if len(shapes[0]) == 2 else ()) + (rows, *shapes[0][1:])
