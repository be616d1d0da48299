"""Encode a window of audio chunk by chunk as it arrives, with a state that is carried from chunk to chunk."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

State = Mapping[str, Any]


class LiveEncoder:
    """The compiled programs of one model. They do not change a state, so an earlier one can be used again.

    Args:
        model: with its parameters; it attends by chunks.
        c: its config.
    """

    def __init__(self, model: nnx.Module, c: Any):
        graphdef, self._params = nnx.split(model)
        self._begun, self._encoded = (jax.jit(partial(f, graphdef)) for f in (self._begin, self._next))
        self.width = 2 * c.audio_chunk  # frames of a chunk
        self.positions, self.chunks = c.audio_positions, -(-c.audio_positions // c.audio_chunk)

    def begin(self, frame_C: np.ndarray) -> State:
        """Return the state of a window that begins with this frame."""
        return self._begun(self._params, frame_C[None, None])

    def encode(self, state: State, frames_MC: np.ndarray, valid_M: np.ndarray, first: int, last: int) -> State:
        """Return the state after the chunks from `first` up to `last` of the frames of a whole window."""
        behind = self.chunks * self.width + 1 - len(frames_MC)  # the frame after, which is read but never there
        frames_MC, valid_M = np.pad(frames_MC, ((0, behind), (0, 0))), np.pad(valid_M, (0, behind))
        for at in range(first * self.width + 1, last * self.width + 1, self.width):
            state = self._encoded(self._params, state, frames_MC[None, at:at + self.width],
                                  valid_M[None, at:at + self.width])
        return state

    def memory(self, state: State) -> jax.Array:
        """Return the memory of a window [1, S, D]: of the chunks that are encoded, and zeros behind."""
        return state["memory"][:, :self.positions]

    def _begin(self, graphdef, params, frame_11C):
        model = nnx.merge(graphdef, params)
        scale_D = model.norm.scale[...]
        memory_1SD = jnp.zeros((1, self.chunks * self.width // 2, len(scale_D)), scale_D.dtype)
        return {"memory": memory_1SD, "carried": model.begin_stream(frame_11C.astype(scale_D.dtype))}

    def _next(self, graphdef, params, state, frames_1MC, valid_1M):
        model, carried, memory_1SD = nnx.merge(graphdef, params), state["carried"], state["memory"]
        new_1SD, after = model.encode_next(carried, frames_1MC.astype(memory_1SD.dtype), valid_1M)
        return {"memory": jax.lax.dynamic_update_slice_in_dim(memory_1SD, new_1SD, carried["at"], 1), "carried": after}
