"""Run Mosaic GPU kernels without a GPU."""

import jax
import pytest
from jax._src import callback, effects

from jaxtrain.kernels import grouped_matmul
from jaxtrain.kernels.attention import mosaic_attention

# JAX 0.10's interpreter does not know transposed views, and jaxtrain does not use the kernels with it.
needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels need JAX 0.11 or newer")


@pytest.fixture
def interpreted(monkeypatch):
    """Pallas's interpreter runs the kernels, in float32 too, wherever shapes allow them; races are errors."""
    interpret(monkeypatch)


def interpret(monkeypatch):
    """Let the kernels be interpreted from here on."""
    from jax.experimental.pallas import mosaic_gpu

    for kernels in (grouped_matmul, mosaic_attention):
        monkeypatch.setattr(kernels, "INTERPRET", mosaic_gpu.InterpretGPUParams(detect_races=True))
    for allowed in (effects.remat_allowed_effects, effects.custom_derivatives_allowed_effects,
                    effects.control_flow_allowed_effects):
        allowed.add_type(type(callback._OrderedIOEffect))
