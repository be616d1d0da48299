"""The instructions of a compiled program, each with the FLOP it computes and the bytes it reads and writes.

They are parsed from the text of optimised HLO (`compiled.as_text()`). Costs are those of one execution; the caller must
know how often an instruction runs, for example from a trace.
"""

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxtrain.kernels.grouped_matmul import DIMENSION, ROWS
from jaxtrain.plan import hlo
from jaxtrain.plan.trace.kernels import packed_flops, phase_of, splash_flops

CONTAINERS = ("while", "conditional", "call", "async-start", "async-done")  # their time is that of what they run
_NOTHING = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier", "iota",
            "partition-id", "replica-id", "add-dependency")
_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "reshape")

COUNTED = "counted="  # costs that were counted before (jaxtrain.plan.recorded)
_EXACT = re.compile(r'operand_precision(?:":\["|=\{)high', re.IGNORECASE)  # products that round no operand
_KERNELS = ("mosaic_gpu", "__gpu$xla.gpu.triton")  # what calls jaxtrain's kernels, by the name of the compiler
_GROUPED = re.compile(r"grouped_matmul_(\d+)_rows")  # the name of kernels/grouped_matmul.py
_TOLD = re.compile(r"recurrent_\w+_(\d+)_flop")  # the name of kernels/chunks/chunk_tiles.py
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_NAMED = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPERATION = re.compile(r"\s*([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
PREFETCHES = ("copy-start", "slice-start")  # copies beside computation; on TPUs into the memory beside its cores
_HOST = "S(5)"  # the memory space of the host, in the layout of an array

Array = tuple[str, tuple[int, ...]]


@dataclass
class Instruction:
    """One instruction of the program, with the cost of one execution on one device."""

    name: str
    opcode: str  # in HLO: "fusion", "dot", "all-reduce-start"
    text: str  # the whole line
    arrays: list[Array]  # dtype and dimensions of each result
    operands: list[str]
    called: list[str]  # computations
    is_root: bool
    computation: str
    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = ""  # of its products' operands; "" without products
    rounds: bool = False  # whether they may round operands of float32
    grouped: bool = False  # whether it is a kernel of `kernels.grouped_matmul`
    inner: "Instruction | None" = None  # the kernel of attention in a fusion with slices
    attends: tuple[int, int] = (0, 0)  # of a kernel of attention: the width of a head, and the length of a row
    masked: bool = False  # whether it is cuDNN's, with an array as mask
    on_host: bool = False  # whether its result is in the host's memory, or a part of it
    from_host: bool = False  # whether an operand is

    @property
    def path(self) -> str:
        """The place in the model that it comes from: JAX's scopes, such as "jit(step)/jvp()/attention/mul"."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""

    @property
    def useful(self) -> list[Array]:
        """The results without the workspace, as bytes, that library kernels also return."""
        if self.opcode != "custom-call":
            return self.arrays
        return self.arrays[:1] + [array for array in self.arrays[1:] if array[0] not in ("s8", "u8")]

    @property
    def target(self) -> str:
        """The target of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.text)
        return found[1] if found else ""

    @property
    def own(self) -> bool:
        """Whether it is a kernel of jaxtrain's for GPUs."""
        return (self.inner or self).target.startswith(_KERNELS)

    @property
    def compiler(self) -> str:
        """The compiler of a kernel of jaxtrain's own: "mosaic" or "triton"."""
        return "triton" if (self.inner or self).target.startswith(_KERNELS[1]) else "mosaic"

    @property
    def attention(self) -> str:
        """Whether it is a kernel of attention: "attention", "attention backward", or "" for all others."""
        if self.inner is not None:
            return self.inner.attention
        phase = phase_of(self.path) if self.target == "tpu_custom_call" or self.own else ""
        if phase or "fmha" in self.target:
            return "attention backward" if phase.startswith("d") or "Backward" in self.target else "attention"
        return ""

    @property
    def collective(self) -> str:
        """The kind of a collective; "" for any other instruction."""
        kind = self.opcode.removesuffix("-start").removesuffix("-done")
        return kind if kind in hlo.KINDS else ""

    @property
    def result(self) -> str:
        """The types of its results, such as "bf16[8,128]"."""
        return ", ".join(f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in self.arrays)


@dataclass
class Program:
    """All instructions of a compiled program by name, and the computations that contain them."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    devices: int = 1
    entry: str = ""  # its outermost computation

    def inside(self, name: str) -> Iterator[Instruction]:
        """Yield the instructions of a computation and of all that it calls."""
        for instruction in self.computations.get(name, ()):
            yield instruction
            for called in instruction.called:
                yield from self.inside(called)

    def path(self, instruction: Instruction) -> str:
        """Return where in the model an instruction comes from; for a fusion without a path, that of its products."""
        inner = [one for name in instruction.called for one in self.inside(name)] if not instruction.path else []
        told = sorted((one for one in inner if one.path), key=lambda one: (not one.flops, not one.is_root))
        return told[0].path if told else instruction.path

    def operand(self, instruction: Instruction, index: int) -> Array:
        """Return the dtype and dimensions of an operand."""
        found = self.instructions.get(instruction.operands[index]) if len(instruction.operands) > index else None
        return found.arrays[0] if found is not None and found.arrays else ("", ())

    def axes(self, instruction: Instruction, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """Return the axes of a mesh of these sizes along which a collective joins devices."""
        try:
            groups = hlo.device_groups(instruction.text, self.devices)
        except AssertionError:  # the end of an asynchronous one does not repeat its devices
            begun = self.instructions.get(instruction.operands[0]) if instruction.operands else None
            return self.axes(begun, mesh) if begun is not None else ()
        found = hlo.Collective(instruction.collective, (), 1, "", groups, False)
        return tuple(axis for axis, size in mesh.items() if size > 1 and found.joins(axis, mesh))


def program(text: str) -> Program:
    """Parse a program's text and count the cost of its instructions."""
    devices = re.search(r"num_partitions=(\d+)", text)
    made, computation = Program(devices=int(devices[1]) if devices else 1), ""
    text = re.sub(r'\n(?="|\}\})', "", text)  # the metadata of Pallas kernels is broken over lines
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if not line.startswith(" "):
            if header := _HEADER.match(line):
                computation = header[1]
                made.computations[computation] = []
                made.entry = computation if line.startswith("ENTRY") else made.entry
        elif computation and (instruction := _parsed(line, computation)):
            made.instructions[instruction.name] = instruction
            made.computations[computation].append(instruction)
    for instruction in made.instructions.values():
        _count(instruction, made)
    return made


def size(array: Array) -> float:
    """Return the bytes of an array."""
    dtype, dims = array
    bits = re.search(r"\d+", dtype)
    width = hlo.BYTES.get(dtype) or (1 if dtype.startswith("f8") else int(bits[0]) / 8 if bits else 1)
    return width * math.prod(dims)


def _parsed(line: str, computation: str) -> Instruction | None:
    named = _NAMED.match(line)
    if not named:
        return None
    rest = line[named.end():]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    operation = _OPERATION.match(rest, end)
    if not operation:
        return None
    begin = operation.end() - 1
    close = begin + _closing(rest[begin:])
    called = _CALLED.findall(rest, close)
    for branches in _BRANCHES.findall(rest, close):
        called += [name.strip().lstrip("%") for name in branches.split(",")]
    operands = [] if operation[1] in ("constant", "parameter") else re.findall(r"%([\w.\-]+)", rest[begin:close])
    return Instruction(named[2], operation[1], line, _arrays(rest[:end]), operands, called, bool(named[1]), computation,
                       on_host=_HOST in rest[:end])


def _closing(text: str) -> int:
    """Return where the parenthesis at the beginning of `text` is closed."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place
    return len(text)


def _arrays(text: str) -> list[Array]:
    return [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _ARRAY.findall(text)]


# ---------------------------------------------------------------------------------------------------------------- costs
def _count(instruction: Instruction, made: Program) -> None:
    if COUNTED in instruction.text:
        told = json.JSONDecoder().raw_decode(instruction.text.partition(COUNTED)[2])[0]
        for key, value in told.items():
            setattr(instruction, key, tuple(value) if key == "attends" else value)
        return
    if instruction.opcode in (*_NOTHING, *CONTAINERS) or instruction.opcode.endswith("-done"):
        return
    if instruction.target == "AllocateBuffer":
        return
    instruction.from_host = any(made.instructions[name].on_host for name in instruction.operands
                                if name in made.instructions)
    products = [instruction, *(inner for name in instruction.called for inner in made.inside(name))]
    for product in products:
        if product.own and (filled := _GROUPED.search(product.path)):
            _count_grouped(instruction, product, int(filled[1]), made)
            return
        if flops := _flops(product, made):
            instruction.flops += flops
            if product.attention:
                instruction.inner = product if product is not instruction else None
                instruction.attends, instruction.masked = _attends(product, made), "ScaleBias" in product.target
            first = 2 if product.target == "tpu_custom_call" else 0  # behind the tables of blocks
            in_tiles = product.own and _TOLD.search(product.path)  # whose products are TF32's
            instruction.dtype = instruction.dtype or ("f32" if in_tiles else made.operand(product, first)[0])
            instruction.rounds = not _EXACT.search(product.text)
    if instruction.opcode in ("fusion", "fusion-start"):
        body = made.computations.get(instruction.called[0], [])
        instruction.bytes = _read_by_fusion(body, made) + _written_by_fusion(body, made)
    elif instruction.opcode == "dynamic-update-slice":  # in place
        instruction.bytes = 2 * size(made.operand(instruction, 1))
    elif instruction.opcode in _SLICES:
        instruction.bytes = 2 * sum(map(size, instruction.arrays))
    elif instruction.opcode in PREFETCHES:  # their results name both sides: of copies the copy first, of slices last
        instruction.bytes = 2 * size(instruction.arrays[0 if instruction.opcode == "copy-start" else 1])
    else:
        read = sum(size(array) for name in instruction.operands if (operand := made.instructions.get(name))
                   for array in operand.arrays)
        instruction.bytes = read + sum(map(size, instruction.useful))


def _count_grouped(instruction: Instruction, kernel: Instruction, filled: int, made: Program) -> None:
    """Count a kernel for a grouped matmul, alone or in a fusion with slices of weights: of the rows that it is named
    after, which may be a part of the array, and of those in blocks that are computed for two groups.
    """
    (dtype, (_, depth)), (other_dtype, other) = (made.operand(kernel, index) for index in (1, 2))
    result = kernel.arrays[0]
    instruction.dtype, instruction.grouped = dtype, True
    if len(other) == 3:  # rows [R, K] and weights of groups
        instruction.flops = 2.0 * (filled + other[0] * ROWS) * depth * result[1][1]
        read = size((dtype, (filled, depth))) + size((other_dtype, other))
    else:  # rows [R, K] and [R, N], or their transposes
        groups, depth, width = result[1]
        instruction.flops = 2.0 * (filled + groups * DIMENSION) * depth * width
        read = size((dtype, (filled, depth + width)))
    instruction.bytes = read + size(result)


def _attends(kernel: Instruction, made: Program) -> tuple[int, int]:
    """Return the width of a head and the length of a row, [B, T, H, K], of a kernel of attention for GPUs."""
    shape = next((dims for dtype, dims in (made.operand(kernel, index) for index in range(3)) if len(dims) == 4), ())
    return (shape[3], shape[1]) if shape else (0, 0)


def _flops(instruction: Instruction, made: Program) -> float:
    """Return the FLOP of a matrix product, of attention in one kernel, or of another kernel that says it."""
    target = instruction.target
    if instruction.opcode == "dot":
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.text)
    elif "matmul" in target or "gemm" in target:  # cuBLAS, oneDNN
        summed = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.text)
    elif instruction.opcode == "convolution":
        return _convolution(instruction, made)
    elif instruction.attention and "fmha" not in target:
        arrays = [made.instructions[name].arrays[0] for name in instruction.operands if name in made.instructions]
        rows = [dims for dtype, dims in arrays if len(dims) > 2 and dtype in ("bf16", "f16", "f32")]
        window = re.search(r"\bwindow_(-?\d+)", instruction.path)
        count = packed_flops if instruction.own else splash_flops
        return count(phase_of(instruction.path), rows, int(window[1]) if window else 0)
    elif "fmha" in target:
        (_, queries), (_, keys) = (made.operand(instruction, index) for index in (0, 1))
        if len(queries) != 4 or len(keys) != 4:
            return 0.0
        B, T, H, K = queries
        # Two products forward, five backward; causal, so about half of the pairs, unless there is a mask. (With a mask
        # and a window it was not measured.)
        window = re.search(r'"sliding_window_length":"?[1-9]', instruction.text)
        both_ways = "cudnn_fmha_backend_config" in instruction.text and 'CAUSAL"' not in instruction.text
        pairs = T * keys[1] / (1 if both_ways or ("ScaleBias" in target and not window) else 2)
        return (5 if "Backward" in target else 2) * 2.0 * B * H * pairs * K
    elif instruction.own:
        said = _TOLD.search(instruction.path)
        return float(said[1]) if said else 0.0
    else:  # a kernel that says what it costs, as those of chunks do on TPUs
        said = re.search(r'"cost_estimate":\{"flops":"(\d+)"', instruction.text)
        return float(said[1]) if said and target == "tpu_custom_call" else 0.0
    left = made.operand(instruction, 0)[1]
    if not summed or not instruction.arrays:
        return 0.0
    depth = math.prod(left[int(index.strip('"'))] for index in summed[1].split(",") if index)
    return 2.0 * math.prod(instruction.arrays[0][1]) * depth


def _convolution(instruction: Instruction, made: Program) -> float:
    """Return the FLOP of a convolution, the form that matrix products have on TPUs, without those on padding.

    Dimensions that both operands share are spatial ones, dilated and padded so that one position of each pair is not
    padding.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.text)
    left, right = (made.operand(instruction, index)[1] for index in (0, 1))
    if not labels or not instruction.arrays or not left or not right:
        return 0.0
    out, fields = instruction.arrays[0][1], dict(re.findall(r"(\w+)=([\dx_\-]+)", _window(instruction.text)))
    products = 2.0 * out[labels[3].index("b")] * out[labels[3].index("f")] * right[labels[2].index("i")]
    for d in range(len(left) - 2):
        def of(name: str, default: str, d: int = d) -> str:
            return fields[name].split("x")[d] if name in fields else default
        low = int(of("pad", "0_0").split("_")[0])
        products *= _pairs(out[labels[3].index(str(d))], right[labels[2].index(str(d))], left[labels[1].index(str(d))],
                           int(of("stride", "1")), low, int(of("lhs_dilate", "1")), int(of("rhs_dilate", "1")))
    return products


def _window(text: str) -> str:
    found = re.search(r"window=\{([^}]*)\}", text)
    return found[1] if found else ""


@functools.cache
def _pairs(out: int, kernel: int, given: int, stride: int, low: int, dilate: int, kernel_dilate: int) -> int:
    """Return how many pairs of a result's and a kernel's position meet a value rather than padding."""
    at = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * kernel_dilate - low
    return int(((at >= 0) & (at <= (given - 1) * dilate) & (at % dilate == 0)).sum())


def _read_by_fusion(body: list[Instruction], made: Program) -> float:
    """Return the bytes that a fusion reads of its operands; if it only takes slices of one, those of the slices."""
    users: dict[str, list[Instruction]] = {}
    for instruction in body:
        for name in instruction.operands:
            users.setdefault(name, []).append(instruction)

    def share(instruction: Instruction) -> float:
        """Return the share of its values that the fusion computes or reads."""
        total, whole = 0.0, sum(map(size, instruction.arrays))
        for user in users.get(instruction.name, ()):
            if user.opcode in _VIEWS or user.opcode == "convert":  # of what is taken of it later
                total += share(user)
            elif user.opcode in _SLICES and user.operands[0] == instruction.name:
                total += sum(map(size, user.arrays)) / whole
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != instruction.name:
                return 1.0
        return min(total, 1.0)

    return sum(share(instruction) * sum(map(size, instruction.arrays))
               for instruction in body if instruction.opcode == "parameter")


def _written_by_fusion(body: list[Instruction], made: Program) -> float:
    """Return the bytes of a fusion's results; of one updated in place, those of the part that changes."""
    def written(instruction: Instruction | None) -> float:
        while instruction is not None and instruction.opcode in _VIEWS:
            instruction = made.instructions.get(instruction.operands[0])
        if instruction is None:
            return 0.0
        if instruction.opcode == "dynamic-update-slice":
            return size(made.operand(instruction, 1))
        if instruction.opcode == "get-tuple-element" and instruction.arrays[0][0] in ("s8", "u8"):
            return 0.0  # the workspace of a library kernel
        return sum(map(size, instruction.useful))

    root = next((instruction for instruction in body if instruction.is_root), None)
    if root is not None and root.opcode == "tuple":
        return sum(written(made.instructions.get(name)) for name in root.operands)
    return written(root)
