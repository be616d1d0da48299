"""Parameters from a folder in Hugging Face's format, straight into their shardings, and back into such a folder.

Each process reads only the slices that its devices hold. On the way back one tensor at a time, such as one matrix of
one layer or expert, is gathered and written.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxtrain.base.annotations import AnyArray
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.config.family import entries, family
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.config.vision_keys import ImageConfig
from jaxtrain.errors import UserError, say
from jaxtrain.files.work_progress import Work
from jaxtrain.hf.encoder_tensors import image_encoder
from jaxtrain.hf.hf_format import Entry
from jaxtrain.hub.weights import joined_tensors, mxfp4, safetensors_files
from jaxtrain.hub.weights.mxfp4 import Packed
from jaxtrain.hub.weights.safetensors_files import Tensor
from jaxtrain.models import lora
from jaxtrain.models.heads import scalar_head
from jaxtrain.sharding.axis_rules import axes_of
from jaxtrain.train_step import quantization
from jaxtrain.train_step.quantized_kernels import KERNEL, SCALES, as_floats
from jaxtrain.train_step.state import Params

Parts = dict[str, list[tuple[Entry, tuple[int, ...]]]]  # by tensor: parameters that it holds, and which layer, expert

PART = 2**28  # bytes of a shard that a host holds at once, while they are on their way to a device

# Not parameters: buffers that old versions saved. Nor those of a language model: other parts of a multimodal one.
_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|\.embeddings\.position_ids$")
_OTHER_PARTS = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector|visual|embed_vision|audio_tower|"
                          r"embed_audio)\.|model\.vision_model\.")
_HEADS = ("lm_head.", "score.", "ctc_head.", "mtp.")  # whose names begin with no prefix
_TABLES = ("model.embed_tokens.weight", "transformer.wte.weight", "model.decoder.embed_tokens.weight",
           "backbone.embeddings.weight")


def load(folder: str | Path, model: ModelConfig, abstract: Params, earlier: Params = None,
         same: Collection[str] = ()) -> Params:
    """Return the parameters in `folder`, in the dtypes and shardings of `abstract`, a nested dict.

    A head of values is left out, a reward head that is not there, and an output projection in whose place one is asked
    for.

    Args:
        folder: a folder in Hugging Face's format.
        model: its config.
        abstract: the parameters that are wanted.
        earlier: parameters that were loaded from another folder, of which those that lie in the same files are taken.
        same: the names of the files that are the same in that folder.

    Raises:
        UserError: a tensor is missing, left over, or of another shape than the model's.
    """
    whole = by_full_name(safetensors_files.tensors_of(folder), model)
    headed = scalar_head.REWARD in abstract
    abstract = scalar_head.without_heads(abstract, (scalar_head.REWARD,) if "score.weight" in whole else ())
    wanted = flatten(as_floats(abstract))
    declared = entries(model, headed)
    known = {entry.ours: entry for entry in declared if not entry.copy}
    if missing := [path for path in wanted if path not in known]:
        raise UserError(f"{folder}", f"no published tensor holds the parameter {missing[0]}", _fix(missing[0]))
    tensors = mxfp4.joined(folder, joined_tensors.apart(folder, whole, [
        (path, name, published_shape(known[path], leaf.shape))
        for path, leaf in wanted.items() for name, _ in names(known[path], leaf.shape)]))
    used = _tied_head(folder, tensors) if model.ties_head else {"lm_head.weight", "lm_head.bias"} if headed else set()
    readers = readers_of(folder, tensors, known, wanted, used)
    used |= _copies(folder, tensors, [entry for entry in declared if entry.copy and entry.ours in wanted], known)
    if left := sorted(name for name in tensors.keys() - used if not _is_ignored(name, model)):
        raise UserError(f"{folder}", f"it has {left[0]}, for which model.name={model.name} has no parameter",
                        "give the config that its config.json describes")
    _say_left_out(folder, tensors.keys() - used)
    flat = flatten(abstract)
    for path in [path for path in flat if path not in readers]:  # scales
        kernel = path.removesuffix(SCALES) + KERNEL
        each = tuple(partial(_read_quantized, readers[kernel], wanted[kernel].shape, flat[kernel], flat[path], part)
                     for part in (0, 1))
        readers[kernel], readers[path] = each
    return _all_placed(abstract, readers, {} if earlier is None else _in_files(same, flatten(earlier), tensors, known))


def load_encoder(folder: str | Path, model: ImageConfig, abstract: Params) -> Params:
    """Return the encoder of images in a folder that has SigLIP or CLIP, as `abstract` says; like `load`."""
    known = {entry.ours: entry for entry in image_encoder(model)}
    inside = {"image": abstract}
    readers = readers_of(folder, safetensors_files.tensors_of(folder), known, flatten(inside), set())
    return _all_placed(inside, readers)["image"]


def _in_files(files: Collection[str], flat: Mapping[str, jax.Array], tensors: Mapping[str, Tensor | Packed],
              known: Mapping[str, Entry]) -> dict[str, jax.Array]:
    """Return the parameters that lie in these files alone, by path."""
    def whole(path: str) -> bool:
        if path not in known:  # scales, whose values are computed again as well
            return False
        found = [tensors[name] for name, _ in names(known[path], _shape(path, flat))]
        return all(isinstance(tensor, Tensor) and tensor.file.name in files for tensor in found)

    return {path: leaf for path, leaf in flat.items() if _scales_of(path, flat) is None and whole(path)}


def _all_placed(abstract: Params, readers: Mapping[str, Callable[..., np.ndarray]],
                there: Mapping[str, jax.Array] = MappingProxyType({})) -> Params:
    """Return the arrays of abstract ones, which are read by path unless they are there."""
    flat = flatten(abstract)
    sizes = {path: math.prod(leaf.shape) * leaf.dtype.itemsize for path, leaf in flat.items() if path not in there}
    with Work("loading weights", sum(sizes.values()), quiet=jax.process_index() != 0) as work:
        loaded = []
        for path, leaf in flat.items():
            loaded.append(there[path] if path in there else placed(leaf, readers[path]))
            work.add(sizes.get(path, 0))
    return jax.tree.unflatten(jax.tree.structure(abstract), loaded)


def placed(leaf: Any, read: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
    """Return the array of an abstract one, of which `read` gives any slice.

    Shards are filled in place, part by part, so that the host holds no more than a part, however large they are.
    """
    shards: dict[jax.Device, jax.Array] = {}
    shape, alike = leaf.sharding.shard_shape(leaf.shape), defaultdict(list)
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        alike[tuple(part.start or 0 for part in index)].append(device)
    for (first, devices), at in itertools.product(alike.items(), _parts(shape, leaf.dtype.itemsize)):
        piece = read(tuple(slice(n + one.start, n + one.stop) for n, one in zip(first, at, strict=True)))
        for device in devices:
            part = jax.device_put(piece, device)
            if piece.shape != shape:
                whole = shards.get(device)
                part = _filled(jnp.zeros(shape, leaf.dtype, device=device) if whole is None else whole, part,
                               np.array([one.start for one in at], np.int32))
            shards[device] = part.block_until_ready()
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [*shards.values()])


def _parts(shape: Sequence[int], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices that make up an array of this shape, of at most `PART` bytes where a row of its last dimension is
    smaller."""
    if math.prod(shape) * itemsize <= PART:
        yield tuple(map(slice, [0] * len(shape), shape))
        return
    along = next(d for d in range(len(shape)) if math.prod(shape[d + 1:]) * itemsize <= PART)
    rest = shape[along + 1:]
    each = max(1, PART // (math.prod(rest) * itemsize))
    for before in itertools.product(*map(range, shape[:along])):
        for begin in range(0, shape[along], each):
            yield (*(slice(n, n + 1) for n in before), slice(begin, min(begin + each, shape[along])),
                   *map(slice, [0] * len(rest), rest))


@partial(jax.jit, donate_argnums=0)
def _filled(shard: jax.Array, part: jax.Array, at: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(shard, part, [at[d] for d in range(shard.ndim)])


def readers_of(folder: str | Path, tensors: Mapping[str, Tensor | Packed], known: Mapping[str, Entry],
               wanted: Mapping[str, AnyArray], used: set[str]) -> dict[str, Callable[..., np.ndarray]]:
    """Return the function that reads a slice of each wanted parameter, by path, once all shapes are as they should be.

    `used` gets the names of the tensors that hold them.
    """
    for path, leaf in wanted.items():
        for name, which in names(known[path], leaf.shape):
            used.add(name)
            _check(folder, tensors.get(name), name, published_shape(known[path], leaf.shape), f"{path}{list(which)}")
    return {path: partial(read, tensors, known[path], leaf.shape, leaf.dtype) for path, leaf in wanted.items()}


def _read_quantized(read: Callable[[tuple[slice, ...]], np.ndarray], shape: tuple[int, ...],
                    values: jax.ShapeDtypeStruct, scales: jax.ShapeDtypeStruct, part: int,
                    index: tuple[slice, ...]) -> np.ndarray:
    """Return a slice of a kernel's values (part 0) or scales (1), from whole blocks, one layer after the other."""
    whole = (values, scales)[part]
    along = quantization.dimension_of(values, scales)
    chosen = range(whole.shape[along])[index[along]]
    one, block = shape[along] // whole.shape[along], shape[along] // scales.shape[along]  # values of an entry
    begin = chosen.start * one // block * block
    end = -(-chosen.stop * one // block) * block
    layers = range(shape[0])[index[0]] if along else range(1)
    found = []
    for layer in layers:
        wider = [*index]
        wider[along] = slice(begin, end)
        if along:
            wider[0] = slice(layer, layer + 1)
        both = quantization.quantize_like(values, scales, read(tuple(wider)).astype(np.float32))
        first = chosen.start - begin // one
        found.append(both[part].take(range(first, first + len(chosen)), along))
    return np.concatenate(found)


def read(tensors: Mapping[str, Tensor | Packed], entry: Entry, shape: Sequence[int], dtype: DTypeLike,
         index: tuple[slice, ...]) -> np.ndarray:
    """Return a slice of a parameter of this shape."""
    stacked = _stacked(entry)
    chosen = [range(size)[part] for size, part in zip(shape, index, strict=True)]
    out = np.empty([len(part) for part in chosen], dtype)
    for at in itertools.product(*(range(len(part)) for part in chosen[:stacked])):
        name = _name(entry, [part[n] for part, n in zip(chosen[:stacked], at, strict=True)])
        if isinstance(tensor := tensors[name], mxfp4.Packed):
            out[at] = tensor.read(index[stacked:], entry.part)
            continue
        whole = _as_ours(tensor.view(), entry, shape[stacked:])
        out[at] = whole[index[stacked:-1]][..., _order(entry, shape[-1])[index[-1]]] if entry.paired else \
            whole[index[stacked:]]
    return out


def save(params: Params, model: ModelConfig, folder: Path, dtype: DTypeLike, limit: int,
         adapters: LoraConfig | None = None, trained: Params = None, there: bool = False) -> list[str]:
    """Write the parameters into files of at most `limit` bytes each, and their index; return the files' names.

    Every process makes the call, and writes its share of the files.

    Args:
        params: all parameters.
        model: their config.
        folder: which is there.
        dtype: of most tensors.
        limit: the most bytes of a file of several tensors.
        adapters: the keys of those that are among the parameters, which are added to their matrices.
        trained: those of the parameters that change. Tensors of which none does have files of their own.
        there: the folder has these files already.
    """
    flat, adapters = lora.as_plain(flatten(params), adapters or LoraConfig())
    lora_scale = lora.scale(adapters)
    parts = parts_of(entries(model, scalar_head.REWARD in params), flat)
    changing = None if trained is None else {*flatten(trained)}
    apart = [] if changing is None else [name for name, held in parts.items() if not any(
        changing & {entry.ours, *adapter_of(entry.ours)} for entry, _ in held)]
    shapes = {name: _shape_on_disk(entry, flat) for name, [(entry, _), *_] in parts.items()}
    kinds = {name: np.dtype(np.float32 if entry.float32 else dtype) for name, [(entry, _), *_] in parts.items()}
    return safetensors_files.write_folder(
        folder, shapes, kinds, lambda name: published(parts[name], flat, kinds[name], lora_scale), limit,
        (jax.process_index(), jax.process_count()), {*apart}, there)


def adapter_of(path: str) -> list[str]:
    """Return the paths of the adapter that a parameter may have: its two factors, and its magnitudes."""
    module, _, matrix = path.rpartition("/")
    own = f"{module}/{lora.NAME}" if matrix == KERNEL else f"{module}/{lora.NAME}/{matrix}"  # the latter: of experts
    return [f"{own}/{name}" for name in ("down", "up", "magnitude")]


def parts_of(known: Iterable[Entry], flat: Mapping[str, jax.Array]) -> Parts:
    """Return the parameters that each tensor holds, by its name."""
    parts: Parts = defaultdict(list)
    for entry in known:
        for name, which in names(entry, flat[entry.ours].shape):
            parts[name].append((entry, which))
    return parts


def names(entry: Entry, shape: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors that hold a parameter of this shape, and which of its layers and experts each one is."""
    for which in itertools.product(*map(range, shape[:_stacked(entry)])):
        yield _name(entry, which), which


def published_shape(entry: Entry, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of each tensor that holds a parameter of this shape."""
    sizes = _sizes(entry, shape[_stacked(entry):])
    shape = [math.prod(sizes[letter] for letter in group) for group in _groups(entry)]
    return tuple(shape) if entry.rows is None else (entry.rows[1] * entry.stretches, *shape[1:])


def _stacked(entry: Entry) -> int:
    return (entry.layers is not None) + (entry.experts > 0)


def _name(entry: Entry, which: Sequence[int]) -> str:
    number = entry.layers[which[0]] if entry.layers is not None else None
    return entry.theirs.format(layer=number, expert=which[-1] if which else None)


@lru_cache
def _groups(entry: Entry) -> list[str]:
    """Return the letters of each of the tensor's dimensions."""
    return [several or one for several, one in re.findall(r"\((\w+)\)|(\w)", entry.layout.split("->")[0])]


def _sizes(entry: Entry, shape: Sequence[int]) -> dict[str, int]:
    sizes = shape if entry.cut is None else entry.cut
    return dict(zip(entry.layout.split("->")[1], sizes, strict=True)) | {"p": entry.part[1]}


def _as_ours(tensor: np.ndarray, entry: Entry, shape: Sequence[int]) -> np.ndarray:
    """Return a tensor with the dimensions of one layer's parameter, of this shape; a view where it needs no copy."""
    letters, sizes = "".join(_groups(entry)), _sizes(entry, shape)
    x = _rows(tensor, entry, sizes).reshape([sizes[letter] for letter in letters])
    while "p" in letters:
        x = x[(slice(None),) * letters.index("p") + (entry.part[0],)]
        letters = letters.replace("p", "", 1)
    x = x.transpose([letters.index(letter) for letter in entry.layout.split("->")[1]])
    return x if entry.cut is None else x.reshape(shape)


def _rows(tensor: np.ndarray, entry: Entry, sizes: Mapping[str, int]) -> np.ndarray:
    """Return the rows of a tensor that are a parameter's, a view: [stretches, rows, ...] where there are several."""
    if entry.rows is None:
        return tensor
    begin, size = entry.rows
    end = begin + math.prod(sizes[letter] for letter in _groups(entry)[0]) // entry.stretches
    if entry.stretches == 1:
        return tensor[begin:end]
    return tensor.reshape(entry.stretches, size, *tensor.shape[1:])[:, begin:end]


@lru_cache
def _order(entry: Entry, size: int) -> np.ndarray:
    """Return which of the tensor's columns are the parameter's, where pairs of rotary ones are apart in it."""
    plain = size - entry.paired
    if entry.paired_first:
        pairs = np.arange(entry.paired)
        return np.concatenate([pairs[::2], pairs[1::2], np.arange(entry.paired, size)])
    return np.concatenate([np.arange(plain), np.arange(plain, size, 2), np.arange(plain + 1, size, 2)])


def published(parts: Sequence[tuple[Entry, tuple[int, ...]]], flat: Mapping[str, jax.Array], dtype: DTypeLike,
              lora_scale: float) -> np.ndarray:
    """Gather a tensor from the parameter, or the parameters, that it holds."""
    out = np.zeros(_shape_on_disk(parts[0][0], flat), dtype)
    for entry, which in parts:
        shape = _shape(entry.ours, flat)[_stacked(entry):]
        letters, sizes = "".join(_groups(entry)), _sizes(entry, shape)
        piece = _merged(entry.ours, which, flat, dtype, lora_scale)
        if entry.paired:
            piece = piece[..., np.argsort(_order(entry, shape[-1]))]
        piece, ours = piece if entry.cut is None else piece.reshape(entry.cut), entry.layout.split("->")[1]
        where = tuple(entry.part[0] if letter == "p" else slice(None) for letter in letters)
        # Both are views: of a contiguous array, and of stretches, whose number is a dimension of its own.
        _rows(out, entry, sizes).reshape([sizes[letter] for letter in letters])[where] = piece.transpose(
            [ours.index(letter) for letter in letters if letter != "p"])
    return out


def _merged(path: str, which: tuple[int, ...], flat: Mapping[str, jax.Array], dtype: DTypeLike,
            lora_scale: float) -> np.ndarray:
    """Gather one layer of a parameter, or one expert, with the adapter that it may have."""
    down, up, magnitude = adapter_of(path)
    if down not in flat and _scales_of(path, flat) is None:
        return _gathered(flat[path], which, dtype)
    kernel = kernel_of(path, which, flat)
    if down not in flat:
        return kernel.astype(dtype)
    a, b = (_gathered(flat[each], which, np.float32) for each in (down, up))
    if path.endswith(f"/{KERNEL}"):
        a, b = a.reshape(-1, a.shape[-1]), b.reshape(len(b), -1)
    product = (a @ b).reshape(kernel.shape)  # of one expert, or of all
    both = kernel + np.float32(lora_scale) * product
    if magnitude in flat:
        lengths = _gathered(flat[magnitude], which, np.float32)
        both *= lengths * column_norms(kernel, lengths.ndim) / column_norms(both, lengths.ndim)
    return both.astype(dtype)


def kernel_of(path: str, which: tuple[int, ...], flat: Mapping[str, jax.Array]) -> np.ndarray:
    """Gather one layer of a linear layer's weight without an adapter, in float32."""
    scales = _scales_of(path, flat)
    if scales is None:
        return _gathered(flat[path], which, np.float32)
    values = _gathered(flat[path], which, flat[path].dtype)
    return quantization.dequantize(values, _gathered(scales, which, np.float32), np.float32)


def column_norms(weight: np.ndarray, outer: int) -> np.ndarray:
    """Return the norm of a weight for each index of its last `outer` dimensions, which are those of the output.

    It is above 0, so that columns of zeros can be divided by it.
    """
    return np.sqrt(np.maximum(np.square(weight).sum(tuple(range(weight.ndim - outer))), 1e-30))


def _scales_of(path: str, flat: Mapping[str, jax.Array]) -> jax.Array | None:
    return flat.get(path.removesuffix(KERNEL) + SCALES) if path.endswith(f"/{KERNEL}") else None


def _shape_on_disk(entry: Entry, flat: Mapping[str, jax.Array]) -> tuple[int, ...]:
    return published_shape(entry, _shape(entry.ours, flat))


def _shape(path: str, flat: Mapping[str, jax.Array]) -> tuple[int, ...]:
    """Return the shape of a parameter, also of one in few bits."""
    scales = _scales_of(path, flat)
    return flat[path].shape if scales is None else quantization.shape_of(flat[path], scales)


def _gathered(x: jax.Array, which: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Return one layer, or one expert of a layer, on every host."""
    whole = _gather(x.sharding, len(which), np.dtype(dtype))(x, np.asarray(which, np.int32))
    return np.asarray(whole.addressable_shards[0].data)


@lru_cache(maxsize=64)
def _gather(where: jax.NamedSharding, stacked: int, dtype: np.dtype) -> Callable[..., jax.Array]:
    """Return (x, index of its first dimensions) -> x at the index, whole on every device, without any arithmetic."""
    spec = (*where.spec, *(None,) * 8)

    def local(x, at):
        for d in range(stacked):
            mine = lax.dynamic_index_in_dim(x, at[d] % x.shape[0], keepdims=False)
            axes = axes_of(spec[d])
            x = lax.all_gather(mine, axes)[at[d] // x.shape[0]] if axes else mine
        for d in range(x.ndim):
            if axes := axes_of(spec[stacked + d]):
                x = lax.all_gather(x, axes, axis=d, tiled=True)
        return x.astype(dtype)

    return jax.jit(jax.shard_map(local, mesh=where.mesh, in_specs=(where.spec, P()), out_specs=P(), check_vma=False))


def by_full_name(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return tensors by the names of a language model with a head: others lack a prefix, or have one more."""
    published = family(model.name).tensors
    if published is None or not published.prefix:
        return dict(tensors)
    prefix, found = published.prefix, {}
    for name, tensor in tensors.items():
        name = name.removeprefix("language_model.").replace("model.language_model.", "model.")
        name = published.own_name(model, name)
        found[name if name.startswith((prefix, *_HEADS)) else prefix + name] = tensor
    return found


def _tied_head(folder: str | Path, tensors: Mapping[str, Any]) -> set[str]:
    """Return the name of a head that repeats the embeddings, as some tied models have it; refuse any other."""
    head = tensors.get("lm_head.weight")
    table = next((tensors[name] for name in _TABLES if name in tensors), None)
    if head is None:
        return set()
    if table is None or not _equal(head, table):
        raise UserError(f"{folder}", "its lm_head.weight is not the embedding table, and model.tied_embeddings is set",
                        "set it to false")
    return {"lm_head.weight"}


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and all(
        np.array_equal(one.view()[n:n + 1024], other.view()[n:n + 1024]) for n in range(0, one.shape[0], 1024))


def _copies(folder: str | Path, tensors: Mapping[str, Any], copies: Sequence[Entry],
            known: Mapping[str, Entry]) -> set[str]:
    """Return the names of the tensors that are copies of others; refuse those that differ."""
    found = {entry.theirs: known[entry.ours].theirs for entry in copies if entry.theirs in tensors}
    for name, original in found.items():
        if not _equal(tensors[name], tensors[original]):
            raise UserError(f"{folder}", f"its {name} is not {original}, which all predictions share here",
                            "set model.mtp_loss_weight=0 to leave that layer out")
    return {*found}


def has_further_layers(folder: str | Path, model: ModelConfig) -> bool:
    """Return whether the folder has the layers that predict further tokens, or a tensor of them."""
    tensors = by_full_name(safetensors_files.tensors_of(folder), model)
    return any(_name(entry, (0, 0)) in tensors for entry in entries(model) if entry.ours.startswith("ahead/"))


def _say_left_out(folder: str | Path, left: Collection[str]) -> None:
    """Say which parts of a multimodal model are left out."""
    found = {match[0] for name in left if (match := _OTHER_PARTS.match(name))}
    parts = sorted(name.removeprefix("model.").rstrip(".") for name in found)
    if parts and jax.process_index() == 0:
        say(f"{folder} has a multimodal model, of which the language model is read, without {' and '.join(parts)}")


def _is_ignored(name: str, model: ModelConfig) -> bool:
    published = family(model.name).tensors
    if not model.multi_token_loss and name.startswith("mtp."):
        return True
    if published and published.unread(model, name):
        return True
    further = published and published.further_layers and not model.multi_token_loss
    layer = re.search(r"\.layers\.(\d+)\.", name) if further else None
    return bool(_BUFFERS.search(name) or _OTHER_PARTS.match(name)) or (
        layer is not None and int(layer[1]) >= model.num_layers)


def _check(folder: str | Path, tensor: Tensor | Packed | None, name: str, shape: tuple[int, ...],
           ours: str) -> None:
    if tensor is None:
        raise UserError(f"{folder}", f"it has no tensor {name}", "set model.mtp_loss_weight=0, or model.mtp_layers to "
                        "the number of layers for further tokens that it has" if ours.startswith("ahead/") else
                        "give the config that its config.json describes")
    if tensor.shape != shape:
        raise UserError(f"{folder}", f"tensor {name} has the shape {list(tensor.shape)} where the model needs "
                        f"{list(shape)}", "give the config that its config.json describes")
    if isinstance(tensor, Tensor):
        tensor.view()  # refuses a dtype that weights do not have


def _fix(path: str) -> str:
    if path.startswith("ahead/"):
        return ("set model.mtp_loss_weight=0: published weights of this family do not have that layer in a known "
                "format; or train it from new, with train.init_from")
    return "give the config that its config.json describes"
