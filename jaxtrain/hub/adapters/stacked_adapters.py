"""Several adapters beside one model, of which each prompt of a batch uses one.

They are stacked along the rank: one adapter whose rank is the sum of theirs, sharded like any. Each row multiplies what
it has at the rank by its adapter's scale where that one is, and by 0 elsewhere (`lora.choosing`). So ranks and scales
may differ, and an adapter is 0 in layers that only others adapt.

Shape suffixes: B prompts, R the sum of all ranks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.errors import UserError, nearest
from jaxtrain.hub.adapters import adapter_files
from jaxtrain.models import lora
from jaxtrain.models.decoder import Decoder
from jaxtrain.run import abstract_model
from jaxtrain.train_step.state import Params

if TYPE_CHECKING:
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import TrainState

NAME = "adapters"  # in a state's extras: by the name of each, what rows that use it multiply by [R]
NOTHING = 1e-30  # the alpha of all together: where no rows choose, the base computes alone
Folders = Mapping[str, str | Path]  # in PEFT's format, by the names of the adapters


def keys(folders: Folders, model: ModelConfig, quantize: str = "") -> JsonObject:
    """Return the `lora` section of a model with all these adapters, whose frozen weights rest in the bits `quantize`.
    """
    each = [_keys_of(name, folder, model) for name, folder in folders.items()]
    if not each:  # only adapted models have frozen weights
        return {"rank": 1, "quantize": quantize} if quantize else {}
    rank, targets = sum(c.rank for c in each), sorted({path for c in each for path in c.targets})
    return {"rank": rank, "alpha": NOTHING, "targets": targets, "quantize": quantize}


def _keys_of(name: str, folder: str | Path, model: ModelConfig) -> LoraConfig:
    """Return the `lora` keys of adapters; refuses those of which rows cannot choose one."""
    if not adapter_files.is_adapter_folder(folder):
        raise UserError(f"adapters: {name}", f"{folder} is not a folder of adapters in PEFT's format",
                        "write those of a run: jaxtrain adapters export WORKDIR --output=FOLDER")
    found = LoraConfig(**adapter_files.keys(folder, model))
    if found.dora:
        raise UserError(f"adapters: {name}", f"{folder} has DoRA, whose column lengths cannot be chosen per prompt",
                        "load it alone, or merge it: jaxtrain adapters merge")
    modules = lora.published_modules(model)
    if model.latent_attention and any(lora.is_target(f"{stack}/layer/attention/kv", found, modules) for stack in
                                           Decoder.STACKS):
        raise UserError(f"adapters: {name}", f"{folder} adapts kv_b_proj, which generation uses as one matrix for all "
                        "rows", "load it alone, or merge it: jaxtrain adapters merge")
    return found


def load(folders: Folders, run: "Run", base: Params) -> tuple[Params, dict[str, np.ndarray]]:
    """Return the stacked adapters of a run with the keys of these, and what rows multiply by, by the name of each.

    `base`: all other parameters.
    """
    model, abstract = run.config.model, lora.adapters(abstract_model(run))
    modules = lora.published_modules(model)
    whole = flatten(abstract)
    assert run.model is not None
    names = jax.tree.structure(abstract).flatten_up_to(lora.adapters(run.model.axes()))
    along = {path: axes.index("lora") for path, axes in zip(whole, names, strict=True)}
    parts: list[dict[str, jax.Array]] = []
    choices: dict[str, np.ndarray] = {}
    at = 0
    for name, folder in folders.items():
        c = _keys_of(name, folder, model)
        own = {path: jax.ShapeDtypeStruct(tuple(c.rank if n == along[path] else size
                                                for n, size in enumerate(leaf.shape)), leaf.dtype,
                                          sharding=leaf.sharding) for path, leaf in whole.items()}
        adapted = {path: leaf for path, leaf in own.items()
                   if lora.is_target(path.partition(f"/{lora.NAME}/")[0], c, modules)}
        parts.append({path: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding) for path, leaf in own.items()}
                     | adapter_files.load(folder, model, c, adapted, base))
        choices[name] = np.zeros(run.config.lora.rank, np.float32)
        choices[name][at:at + c.rank] = lora.scale(c)
        at += c.rank

    def stacked(parts: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
        return {path: jnp.concatenate([part[path] for part in parts], along[path]) if parts
                else jnp.zeros(leaf.shape, leaf.dtype) for path, leaf in whole.items()}

    found = jax.jit(stacked, out_shardings={path: leaf.sharding for path, leaf in whole.items()})(parts)
    return jax.tree.unflatten(jax.tree.structure(abstract), [found[path] for path in whole]), choices


def chosen(state: "TrainState", many: int, names: Sequence[str | None] | None) -> np.ndarray | None:
    """Return what so many prompts multiply stacked adapters by [B, R], by the names of theirs; None: there are none."""
    choices: dict[str, np.ndarray] | None = state.extras.get(NAME)
    names = [None] * many if names is None else names
    if isinstance(names, str) or len(names) != many:
        raise UserError("adapters", f"they are not {many} names, one for each prompt", "give None where none is used")
    for name in names:
        if name is not None and name not in (choices or {}):
            raise UserError("adapters", f"there is none of the name {name!r}", nearest(name, choices) if choices else
                            "give jt.load_model adapters={NAME: FOLDER}")
    if not choices:
        return None
    none = np.zeros_like(next(iter(choices.values())))
    return np.stack([none if name is None else choices[name] for name in names])
