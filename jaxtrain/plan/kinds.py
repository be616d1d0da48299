"""Classify the operations of a training step, by the scope they were traced in, then by what they do."""

import re
from collections.abc import Mapping

from jaxtrain.plan.cost.time import said
from jaxtrain.plan.instructions import CONTAINERS, Instruction, Program

ATTENTION, HEAD, OPTIMIZER, MATMUL = "attention", "loss head", "optimizer", "matmul"
ELEMENTWISE, CONTROL, COPIES, OTHER = "elementwise", "control flow", "copies", "other programs"
KINDS = (MATMUL, ATTENTION, HEAD, OPTIMIZER, ELEMENTWISE, CONTROL, COPIES, OTHER)  # and collectives, by mesh axis

_SCOPES = {"optimizer": OPTIMIZER, "loss_head": HEAD, "attention": ATTENTION}  # of jax.named_scope
_SCOPE = re.compile(rf"(?<![\w.])({'|'.join(_SCOPES)})(?![\w.])")
# Names of library kernels, used where a trace does not say which instruction called them.
_KERNELS = ((r"nccl", "collectives"), (r"fmha|flash|sdpa|attention", ATTENTION),
            (r"gemm|cutlass|nvjet|xmma|cublas|wgmma|dot_", MATMUL), (r"memcpy|memset", COPIES))


def kind_of(instruction: Instruction, program: Program, mesh: Mapping[str, int]) -> str:
    """Return the kind of an instruction; for a collective, its name and the mesh axes of its devices."""
    inner = [other for name in instruction.called for other in program.inside(name)]
    for found in (instruction, *(inner if instruction.opcode not in CONTAINERS else ())):
        if found.collective:
            return said(found.collective, program.axes(found, mesh)).removesuffix(" over ")
    if instruction.opcode in CONTAINERS:
        return CONTROL
    if scope := _SCOPE.search(program.path(instruction)):
        return _SCOPES[scope[1]]
    if instruction.attention:
        return ATTENTION
    if instruction.flops:
        return MATMUL
    return COPIES if instruction.on_host or instruction.from_host else ELEMENTWISE


def kind_of_kernel(name: str) -> str:
    """Return the kind of a kernel without a known instruction, from the names that libraries use."""
    return next((kind for pattern, kind in _KERNELS if re.search(pattern, name, re.IGNORECASE)), OTHER)


def rank(kind: str) -> int:
    """Return the priority of a kind: a moment counts for the operations that run then and have the lowest rank.

    Computation comes first, since transfers at the same time cost nothing; a loop comes last, after the operations in
    it.
    """
    return 2 if kind == CONTROL else 1 if is_sent(kind) else 0


def is_sent(kind: str) -> bool:
    """Return whether a kind moves data to other devices or the host: collectives and copies."""
    return kind not in KINDS or kind == COPIES
