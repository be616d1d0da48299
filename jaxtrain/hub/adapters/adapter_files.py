"""Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

The format is described at https://huggingface.co/docs/peft/developer_guides/checkpoint. For a linear layer with a
matrix [out, in] it has lora_A [rank, in] and lora_B [out, rank]. GPT-2 has one matrix for queries, keys and values,
where our three layers have an adapter each; together they are one of three times the rank, whose lora_B has blocks.

Layers that predict further tokens have no place in it: transformers' models, which PEFT adapts, lack them, and PEFT
leaves out what a file has of them. Their adapters are not written, and begin anew where a folder is read.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxtrain.base.annotations import AnyArray, JsonMapping, JsonObject
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.config import hub_names
from jaxtrain.config.family import entries, family
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.errors import UserError, say
from jaxtrain.files import atomic_files, bounded_files
from jaxtrain.hf.hf_config import FILE
from jaxtrain.hf.hf_format import Entry
from jaxtrain.hub.weights import published_weights, safetensors_files
from jaxtrain.hub.weights.safetensors_files import Tensor
from jaxtrain.models import lora
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"  # ends of tensors' names
_PREFIX = "base_model.model."
_FUSED = "attn.c_attn"  # GPT-2's
# Multimodal folders of these types are whole models to transformers, and a language model has this place in them.
_WHOLE, _INSIDE = ("gemma3", "gemma4", "mistral3"), "model.language_model."
_AHEAD = "ahead"  # the layers that predict further tokens, among the parameters
# What changes numbers or says more than low-rank matrices, and the values that mean that it is not used.
_UNUSED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "lora_bias": (False, None), "use_qalora": (False, None),
    "modules_to_save": (None, []), "target_parameters": (None, []), "trainable_token_indices": (None, []),
    "layer_replication": (None, []), "alora_invocation_tokens": (None, []),
    **dict.fromkeys(("use_bdlora", "kasa_config", "lora_ga_config", "monteclora_config"), (None, False))}
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")  # initial values that are subtracted from the model's weights


def is_adapter_folder(folder: str | Path) -> bool:
    """Return whether a folder has adapters in this format alone, not a model beside them."""
    return (Path(folder) / CONFIG).is_file() and not (Path(folder) / FILE).is_file()


def described(folder: str | Path) -> JsonObject:
    """Return what adapter_config.json says; raises UserError for what cannot be expressed here."""
    path = Path(folder) / CONFIG
    found = bounded_files.user_json(path, {"r": int, "lora_alpha": int | float}, f"{path}", "download it again")
    if found is None:
        raise UserError(f"{folder}", f"it has no {CONFIG}", "give a folder in PEFT's format")
    for key, unused in _UNUSED.items():
        if found.get(key, unused[0]) not in unused:
            raise UserError(f"{path}", f"{key}={found[key]!r} cannot be expressed", "use plain LoRA adapters")
    start = found.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise UserError(f"{path}", f"init_lora_weights={start!r} has changed the weights of the model as well",
                        "convert it to plain LoRA with PEFT (save_pretrained with path_initial_model_for_weight_"
                        "conversion)")
    return found


def base_of(folder: str | Path) -> Path:
    """Return the folder of the model that adapters are for, relative to theirs or to the current one."""
    folder, name = Path(folder), described(folder).get("base_model_name_or_path")
    for base in (folder / name, Path(name)) if isinstance(name, str) and name else ():
        if base.is_dir():
            return base
    how = f": {hub_names.command(name)}" if isinstance(name, str) and hub_names.is_name(name) else ""
    raise UserError(f"{folder / CONFIG}", f"base_model_name_or_path={name!r} is not a folder here",
                    f"bring the model here{how}, and write its folder there")


def warn_of_other_base(folder: str | Path, base: str | Path) -> None:
    """Say so if the model that adapters are for is known to be another one."""
    try:
        theirs = base_of(folder)
    except UserError:  # it is not on this machine
        return
    if theirs.resolve() != Path(base).resolve():
        say(f"warning: the adapters in {folder} are for {theirs}, by their {CONFIG}, not for {base}")


def keys(folder: str | Path, model: ModelConfig) -> JsonObject:
    """Return the `lora` section of a config with the adapters in a folder."""
    found, tensors = described(folder), tensors_of(folder, model)
    check_dora(folder, found, tensors)
    linear = {_linear(entry) for entry in entries(model) if _is_linear(entry)}
    targets = sorted({_linear(entry) for entry in entries(model)
                      if _is_linear(entry) and any(_adapts(name, entry) for name in tensors)})
    return {"rank": found["r"], "alpha": float(found["lora_alpha"]), "rank_stabilized": bool(found.get("use_rslora")),
            "dora": bool(found.get("use_dora")), "targets": ["*"] if set(targets) == linear else targets}


def check_dora(folder: str | Path, said: JsonMapping, names: Collection[str]) -> None:
    """Refuse adapters of which some have DoRA and others do not, or that have what their config denies."""
    for stem in (name.removesuffix(DOWN) for name in names if name.endswith(DOWN)):
        if (stem + MAGNITUDE in names) != bool(said.get("use_dora")):
            has, other = ("plain LoRA", True) if said.get("use_dora") else ("DoRA", False)
            raise UserError(f"{folder}", f"{stem.rstrip('.')} has {has}, and by use_dora={other} all layers have the "
                            "other", "train all layers with one of the two, or apart, and add both: jaxtrain adapters "
                            "merge")


def load_with_base(folder: str | Path, model: ModelConfig, c: LoraConfig, abstract: Params) -> Params:
    """Return the adapters in a folder and the parameters of the model that they are for."""
    base = published_weights.load(base_of(folder), model, lora.without_adapters(abstract))
    if _AHEAD in lora.adapters(abstract) and jax.process_index() == 0:
        say(f"{folder} has no adapters of layers that predict further tokens: they begin anew")
    return partition.merge(base, load(folder, model, c, lora.adapters(abstract), base))


def load(folder: str | Path, model: ModelConfig, c: LoraConfig, abstract: Params, base: Params) -> Params:
    """Return the adapters in a folder, without those of layers that predict further tokens.

    Args:
        folder: in PEFT's format.
        model: the model that has them.
        c: the keys that describe them.
        abstract: adapters of the dtypes and shardings to give them, in a nested dict.
        base: all other parameters.

    Raises:
        UserError: they are not those that the `lora` keys describe, or of another model.
    """
    abstract = {name: x for name, x in abstract.items() if name != _AHEAD}
    tensors, wanted, theirs = tensors_of(folder, model), flatten(abstract), keys(folder, model)
    _check(folder, c, theirs, described(folder))
    blocks = any(name.endswith(f"{_FUSED}.{DOWN}") and tensor.shape[0] == 3 * c.rank
                 for name, tensor in tensors.items())
    known = {entry.ours: entry for entry in adapter_entries(model, wanted, blocks)}
    used: set[str] = set()
    readers = published_weights.readers_of(folder, tensors, known, wanted, used)
    if left := sorted(tensors.keys() - used):
        raise UserError(f"{folder}", f"it has {left[0]}, for which this run has no adapter",
                        f"set --config.lora.targets='{json.dumps(theirs['targets'])}'")
    if blocks:
        _check_blocks(folder, tensors, c.rank)

    def array(path: str, leaf: AnyArray) -> jax.Array:
        read = readers[path]
        if path.endswith("/magnitude"):
            lengths = read((slice(None),) * leaf.ndim) / _column_norms(known[path], leaf.shape, flatten(base))
            read = lengths.astype(leaf.dtype).__getitem__
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, read)

    return jax.tree.unflatten(jax.tree.structure(abstract), [array(path, leaf) for path, leaf in wanted.items()])


def _column_norms(entry: Entry, shape: Sequence[int], flat: Mapping[str, jax.Array]) -> np.ndarray:
    """Return the norms of the columns of matrices, which a magnitude of DoRA, of this shape, is relative to here."""
    kernel = f"{entry.ours.removesuffix(f'/{lora.NAME}/magnitude')}/kernel"
    if entry.layers is None:
        return published_weights.column_norms(published_weights.kernel_of(kernel, (), flat), len(shape))
    return np.stack([published_weights.column_norms(published_weights.kernel_of(kernel, (n,), flat), len(shape) - 1)
                     for n in range(shape[0])])


def save(params: Params, model: ModelConfig, c: LoraConfig, folder: Path, base: str, dtype: DTypeLike) -> None:
    """Write the adapters among the parameters, but for those of layers that predict further tokens, and say so.

    Every process makes the call; the first one writes.
    """
    everything, c = lora.as_plain(flatten({name: x for name, x in params.items() if name != _AHEAD}), c)
    flat = {path: x for path, x in everything.items() if lora.is_adapter(path)}
    if not flat:
        raise UserError("lora.targets", f"{c.targets} are of layers that predict further tokens, and PEFT's models "
                        "have no such layers", "write the whole model: jaxtrain export")
    known = adapter_entries(model, flat, True)
    for entry in [entry for entry in known if entry.ours.endswith("/magnitude")]:
        norms, path = _column_norms(entry, flat[entry.ours].shape, everything), entry.ours
        flat[path] *= jax.make_array_from_callback(norms.shape, flat[path].sharding, norms.__getitem__)
    parts = published_weights.parts_of(known, flat)
    place = _place_in(folder, base)
    shapes = {_PREFIX + re.sub(r"^model\.", place, name): published_weights.published_shape(
        entry, flat[entry.ours].shape) for name, [(entry, _), *_] in parts.items()}
    tensors = (published_weights.published(part, flat, dtype, 0) for part in parts.values())
    if jax.process_index():
        for _ in tensors:  # gathering is done by all processes together
            pass
        return
    safetensors_files.write(folder / WEIGHTS, shapes, dict.fromkeys(shapes, dtype), tensors)
    atomic_files.write_json(folder / CONFIG, _config(model, c, flat, base))
    if _AHEAD in lora.adapters(params):
        say("the adapters of layers that predict further tokens are left out, since PEFT's models have no such layers: "
            "jaxtrain export writes them, added to the weights")


def _place_in(folder: Path, base: str) -> str:
    """Return how names of the language model's modules begin in the model that transformers makes of a base."""
    for path in (folder / base / FILE, Path(base) / FILE) if base else ():
        found = bounded_files.user_json(path, dict, f"{path}", "download it again") or {}
        if found.get("model_type") in _WHOLE:
            return _INSIDE
    return "model."


def adapter_entries(model: ModelConfig, paths: Mapping[str, AnyArray], blocks: bool) -> list[Entry]:
    """Return the entries of the adapters among these paths of parameters.

    Args:
        model: the model that has them.
        paths: of parameters.
        blocks: whether the three adapters of one fused matrix are blocks of one with three times the rank; or else it
            has one that they share.
    """
    found = []
    for entry in entries(model):
        down, up = (f"{_linear(entry)}/{lora.NAME}/{name}" for name in ("down", "up"))
        if not _is_linear(entry) or down not in paths:
            continue
        if entry.rows is not None or entry.part[1] not in (1, 3):
            raise UserError("model.name", f"{model.name} is published with {entry.theirs.rpartition('.')[0]} in place "
                            "of several of our layers, and adapters of such cannot be written in PEFT's format",
                            "export the model with the adapters added to its weights: jaxtrain export")
        outer, inner = re.findall(r"\(\w+\)|\w", entry.layout.split("->")[0])
        outer, inner = (inner, outer) if is_turned(model) else (outer, inner)
        ours = entry.layout.split("->")[1]
        given, made = ("".join(letter for letter in ours if letter in group) for group in (inner, outer))
        rank, part = ("(pr)", entry.part) if entry.part[1] > 1 and blocks else ("r", (0, 1))
        name = entry.theirs.removesuffix("weight")
        found += [replace(entry, ours=down, theirs=name + DOWN, layout=f"{rank}{inner}->{given}r", paired=0,
                          part=part),
                  replace(entry, ours=up, theirs=name + UP, layout=f"{outer}{rank}->r{made}")]
        if (magnitude := f"{_linear(entry)}/{lora.NAME}/magnitude") in paths:
            found += [replace(entry, ours=magnitude, theirs=name + MAGNITUDE, layout=f"{outer}->{made}")]
    return found


def is_turned(model: ModelConfig) -> bool:
    """Return whether published matrices of a model are [in, out], as GPT-2's are."""
    published = family(model.name).tensors
    return published is not None and published.turned


def _is_fused(entry: Entry) -> bool:
    return _is_linear(entry) and entry.part[1] > 1


def _is_linear(entry: Entry) -> bool:
    """Return whether it is of a `Linear`, which can have an adapter: of a layer, or of Gemma 4's inputs of layers."""
    return entry.ours.endswith("/kernel") and "/router/" not in entry.ours and not entry.ours.startswith("output/")


def _linear(entry: Entry) -> str:
    """Return the path of the layer whose matrix it is, as `lora.targets` match it."""
    return entry.ours.rpartition("/")[0]


def _adapts(name: str, entry: Entry) -> bool:
    stem = name.removesuffix(DOWN)
    return stem != name and any(stem == entry.theirs.format(layer=layer).removesuffix("weight")
                                for layer in ((None,) if entry.layers is None else entry.layers))


def tensors_of(folder: str | Path, model: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of adapters by the names of the model's modules."""
    found = safetensors_files.tensors_of(folder, WEIGHTS)
    return published_weights.by_full_name({name.removeprefix(_PREFIX): found[name] for name in found}, model)


def _check(folder: str | Path, c: LoraConfig, theirs: Mapping[str, AnyArray], said: JsonMapping) -> None:
    """Refuse adapters that are not as the run's keys say."""
    patterns = {key: said.get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
    if any(patterns.values()) and patterns != _patterns(LoraConfig(**theirs)):
        raise UserError(f"{Path(folder) / CONFIG}", "its layers have different ranks or scales (rank_pattern, "
                        "alpha_pattern), and the lora keys are of all layers",
                        "merge the adapters: jaxtrain adapters merge")
    same = LoraConfig(**theirs)
    fix = " ".join(f"--config.lora.{key}={theirs[key]}" for key in ("rank", "alpha", "rank_stabilized", "dora"))
    if c.dora != same.dora:
        raise UserError("lora.dora", f"{c.dora} is not what the adapters in {folder} have", f"set {fix}")
    if c.rank != same.rank or lora.scale(c) != lora.scale(same):
        raise UserError("lora.rank", f"the adapters in {folder} have rank {same.rank} and are multiplied by "
                        f"{lora.scale(same):g}, this run's rank {c.rank} and {lora.scale(c):g}", f"set {fix}")


def _check_blocks(folder: str | Path, tensors: Mapping[str, Tensor], rank: int) -> None:
    """Refuse a fused matrix's adapter that is not one of three blocks."""
    for name, tensor in tensors.items():
        if name.endswith(f"{_FUSED}.{UP}"):
            x = tensor.view().reshape(3, -1, 3, rank)
            if any(x[p, :, q].any() for p in range(3) for q in range(3) if p != q):
                raise UserError(f"{folder}", f"{name} has rank {3 * rank} for queries, keys and values together",
                                f"set --config.lora.rank={3 * rank}")


def _config(model: ModelConfig, c: LoraConfig, flat: Mapping[str, AnyArray], base: str) -> JsonObject:
    fused = any(f"{_linear(entry)}/" in path for entry in entries(model) if _is_fused(entry) for path in flat)
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base or None, "r": c.rank,
            "lora_alpha": c.alpha, "use_rslora": c.rank_stabilized, "use_dora": c.dora, "lora_dropout": c.dropout,
            "bias": "none", "fan_in_fan_out": is_turned(model), "modules_to_save": None, "inference_mode": True,
            "target_modules": _modules(model, flat),
            **(_patterns(c) if fused else {"rank_pattern": {}, "alpha_pattern": {}})}


def _patterns(c: LoraConfig) -> dict[str, dict[str, float]]:
    """Return what adapter_config.json says of one adapter for queries, keys and values, in blocks: the scale is kept.
    """
    return {"rank_pattern": {_FUSED: 3 * c.rank}, "alpha_pattern": {
        _FUSED: c.alpha * (3**0.5 if c.rank_stabilized else 3)}}


def _modules(model: ModelConfig, flat: Mapping[str, AnyArray]) -> list[str]:
    """Return the shortest ends of modules' names that only those with an adapter have."""
    whole: dict[str, bool] = {}
    for entry in entries(model):
        if not entry.theirs.endswith(".weight"):
            continue
        adapted = f"{_linear(entry)}/{lora.NAME}/down" in flat and _is_linear(entry)
        numbers = entry.layers if entry.layers is not None else (0,)
        whole |= {entry.theirs.format(layer=number, expert=0).removesuffix(".weight"): adapted for number in numbers}
    ends: list[Callable[[str], str]] = [lambda name: name.rpartition(".")[2],
                                        lambda name: re.sub(r"^.*\.\d+\.", "", name), lambda name: name]
    return next(found for end in ends if not (
        set(found := sorted({end(name) for name, adapted in whole.items() if adapted}))
        & {end(name) for name, adapted in whole.items() if not adapted}))
