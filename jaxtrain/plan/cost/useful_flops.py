"""The FLOPs that a row needs, forward and backward: its share of MFU, whatever rematerialization repeats.

Of models that are not decoders of text a row is taken to be full, since only the data say how full it is: a row of
patches holds `model.images_per_row` images of one size, each with a text of `model.text_len` tokens; audio and
transcripts are as long as the config allows. That is not known of images among text.
"""

import math
from collections.abc import Iterator

import jax

from jaxtrain.config.family import family
from jaxtrain.config.schema import Config
from jaxtrain.models import lora
from jaxtrain.observe.flops import flops_per_token
from jaxtrain.run import Run
from jaxtrain.train_step.quantized_kernels import as_floats
from jaxtrain.train_step.report import matmul_parameters

_MATRICES = ("/kernel", *(f"/{lora.NAME}/{matrix}" for matrix in ("down", "up", *lora.STARTS)))
FROZEN = 2 / 3  # of a matrix's FLOPs: the matrix itself has no gradient


def of_row(run: Run, documents: int = 1) -> float:
    """Return the FLOPs of a row of the run's data, of so many documents of equal length; 0: not known."""
    config: Config = run.config
    model, steps = config.model, config.data.seq_len
    if known := family(model.name).useful_flops:
        met, attention = known(model, steps)
        return attention + 6 * sum(size * met(path) for path, size in _matrices(run))
    matmuls = matmul_parameters(run.abstract, run.layout, model, run.objective.frozen_axes)
    return model.flops_known * flops_per_token(model, matmuls, -(-steps // documents), True) * steps


def _matrices(run: Run) -> Iterator[tuple[str, float]]:
    """Yield the path and the size of each matrix: less for one that is not trained, none for tables and teachers."""
    own = {key: tree for key, tree in run.abstract.frozen.items() if key not in run.objective.frozen_axes}
    for tree, share in ((run.abstract.params, 1.0), (own, FROZEN)):
        for keys, leaf in jax.tree_util.tree_flatten_with_path(as_floats(tree))[0]:
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
            is_head = path == "embed/table" and run.config.model.ties_head
            if leaf.ndim > 1 and (is_head or path.endswith(_MATRICES)):
                yield path, share * math.prod(leaf.shape)
