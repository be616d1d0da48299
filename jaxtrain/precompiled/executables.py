"""Executables as bytes, and back onto the devices of a run.

The bytes are a pickle, which executes what it says when it is loaded: `signed_folder.py` is what decides whose bytes
are loaded, and nothing else may call `loaded`.
"""

import io
import pickle
from collections.abc import Sequence

import jax
import numpy as np
from jax._src import compiler
from jax.experimental import serialize_executable

from jaxtrain.errors import UserError


def serialized(compiled: jax.stages.Compiled, devices: Sequence[jax.Device]) -> bytes:
    """Return a program that was compiled for these devices, in the order of the mesh."""
    try:
        content, *trees = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise UserError("compile", f"JAX cannot serialize a program of this config ({f'{error}'.splitlines()[0]})",
                        "start the run without --compiled") from error
    return pickle.dumps((content, *trees, [device.id for device in devices]))


def loaded(content: bytes, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """Return the program, ready to run on these devices, which may have other numbers than it was compiled for."""
    program, in_tree, out_tree, numbers = pickle.loads(content)
    executable, arguments, no_kwargs = _Unpickler(program, list(devices), numbers).load()
    return jax.stages.Compiled(executable.load(), [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs)


class _Unpickler(serialize_executable._JaxPjrtUnpickler):
    """JAX's own, for programs whose devices are numbered otherwise here, as CPU devices of several processes are."""

    def __init__(self, program: bytes, devices: list[jax.Device], numbers: list[int]):
        super().__init__(io.BytesIO(program), devices[0].client, devices)
        self._devices, self._moved = devices, [device.id for device in devices] != numbers
        self.devices_by_id = dict(zip(numbers, devices, strict=True))

    def persistent_load(self, pid: tuple) -> object:
        if pid[0] != "exec" or not self._moved:
            return super().persistent_load(pid)
        options = compiler.get_compile_options(
            num_replicas=1, num_partitions=len(self._devices), device_assignment=np.array([self._devices]))
        return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
