"""Compare the grouped matmuls of this machine's device with float64, in the cases in which kernels have been wrong.

    python -m tools.device.grouped_conformance [--backend=triton] [--large]

Prints a line for each backend and case. Exit status 0: all are right; 1: some are not.
"""

import sys

import jax
import jax.numpy as jnp

from jaxtrain.commands.flags import Parser
from jaxtrain.kernels import grouped_matmul
from jaxtrain.kernels.grouped_conformance import CASES, LARGE, backends, judged


def main(arguments: list[str] | None = None) -> int:
    """Judge the backends of this machine's device."""
    parser = Parser(__doc__, prog="python -m tools.device.grouped_conformance")
    parser.add_argument("--backend", action="append", help="which ones; default: all that can run here")
    parser.add_argument("--large", action="store_true", help="also with the shapes of published models")
    flags = parser.parse_args(arguments)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    cases, wrong = {**CASES, **(LARGE if flags.large else {})}, 0
    here = [one for one in ("xla", *grouped_matmul.KERNELS) if not grouped_matmul.refusal(one, jnp.dtype(dtype))]
    for backend in flags.backend or here:
        able = {name: case for name, case in cases.items() if backend in backends(case, dtype)}
        for name, found in judged(backend, dtype, able):
            wrong += bool(found)
            print(f"{backend}: {name}: {'; '.join(found) or 'right'}", flush=True)
        for name in cases.keys() - able.keys():
            print(f"{backend}: {name}: left to another backend")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
