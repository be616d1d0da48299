"""The compiler's options for a step: a preset for each platform, and what `train.compiler_options` changes in it.

They are passed with the program (`compile(compiler_options=...)`), so that XLA_FLAGS in the environment stay the
user's. What each option of the preset gains is in docs/performance.md, by the compiler's own programs for described
devices (`tools/benchmarks/bench_hlo.py`); none was measured on a GPU.
"""

import math
from collections.abc import Mapping

import jax

from jaxtrain.errors import UserError

Options = Mapping[str, str | bool]

_GPU: Options = {
    # Near the memory limit this pass clones matmuls and leaves the originals scheduled, for no less memory.
    "xla_disable_hlo_passes": "rematerialization",
    # The scheduler gives up overlap above this percentage of what it takes for the device's memory, a cautious share.
    "xla_gpu_memory_limit_slop_factor": "115",
    # cuBLAS reads slices of stacked weights in place, where Triton's fusions are fed with copies.
    "xla_gpu_enable_triton_gemm": False,
}
# A product of an input with several weights, merged into one, is no longer recognized as a product in fp8.
_FP8: Options = {"xla_gpu_dot_merger_threshold_mb": "0"}
# Atomic additions, whose order depends on timing, become sorted ones; cuDNN's backward pass of attention has a flag.
_DETERMINISTIC: Options = {"xla_gpu_exclude_nondeterministic_ops": True}
# XLA ends a process whose threads wait longer than this for each other before a collective begins; by default never.
_TERMINATION = "xla_gpu_nccl_termination_timeout_seconds"
PRESETS: Mapping[str, Options] = {"gpu": _GPU, "cuda": _GPU}


def compiler_options(platform: str, changes: Options, tensor: int = 1, fp8: bool = False,
                     deterministic: bool = False, hang_limit: float = 0.0) -> dict[str, str | bool]:
    """Return the preset of a platform with these changes; the value "" leaves an option to the compiler.

    Where `tensor` parallelism splits products that are not in fp8, Triton's fusions stay, which were faster there and
    do not recognize products in fp8. Devices that are described to the compiler call their platform "cuda:9", with
    their compute capability. `hang_limit`: the seconds after which nothing can be but a hang, of GPUs of several
    processes; 0: it is not known.
    """
    preset = PRESETS.get(platform.partition(":")[0], {})
    if fp8 and preset:
        preset = {**preset, **_FP8}
    elif tensor > 1:
        preset = {name: value for name, value in preset.items() if name != "xla_gpu_enable_triton_gemm"}
    if deterministic and preset:
        preset = {**preset, **_DETERMINISTIC}
    if hang_limit and preset:
        preset = {**preset, _TERMINATION: f"{math.ceil(hang_limit)}"}
    options = {**preset, **{name: _parsed(value) for name, value in changes.items()}}
    return {name: value for name, value in options.items() if value != ""}


def compiled(lowered: jax.stages.Lowered, options: Options) -> jax.stages.Compiled:
    """Compile a program with these options, and refuse in one sentence those that the compiler does not take."""
    try:
        return lowered.compile(compiler_options=dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        sentence = f"{error}".splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        if "compile option" not in sentence and "While setting option" not in sentence:
            raise
        raise UserError("train.compiler_options", f"XLA of JAX {jax.__version__} does not take it ({sentence})",
                        "correct it, or leave it out") from None


def _parsed(value: str | bool | float) -> str | bool:
    """Return what XLA takes: booleans as such, and numbers as text, which it parses itself."""
    text = f"{value}"
    return {"true": True, "false": False}.get(text.lower(), text)
