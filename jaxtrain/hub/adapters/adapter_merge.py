"""Add adapters in PEFT's format to the weights of a published folder, one tensor at a time.

W becomes W + the sum over the adapters of weight x scale x B A, computed in float32. Of DoRA, which has lengths of
columns too, what is added is the weight times the difference that it alone would make.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.config.family import config_of
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.errors import UserError
from jaxtrain.hf import hf_config
from jaxtrain.hub.adapters import adapter_files
from jaxtrain.hub.release import model_card
from jaxtrain.hub.weights import published_weights, rewritten_folder, safetensors_files
from jaxtrain.hub.weights.safetensors_files import DTYPES, OTHERS, Tensor


@dataclass(frozen=True)
class Product:
    """A matrix [out, in] with an adapter: W + scale x up down; with a magnitude its rows have that norm."""

    down: Tensor
    up: Tensor
    magnitude: Tensor | None
    scale: float
    weight: float  # that the difference is added with

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.up.shape[0], self.down.shape[1]

    def added_to(self, whole: np.ndarray) -> np.ndarray:
        """Return what is added to a matrix in float32."""
        more = np.float32(self.scale) * (self.up.view().astype(np.float32) @ self.down.view().astype(np.float32))
        if self.magnitude is not None:
            both = whole + more
            lengths = self.magnitude.view().astype(np.float32).reshape(-1, 1)
            more = lengths / published_weights.column_norms(both.T, 1)[:, None] * both - whole
        return np.float32(self.weight) * more


def merge(base: str | Path, adapters: Sequence[tuple[Path, float]], to: Path, dtype: str | None = None,
          overwrite: bool = False) -> None:
    """Write the model in `base`, with each of the adapters times its weight, as the folder `to`.

    `dtype`: of the weights; None: as they are in `base`. `overwrite`: replace an earlier one.
    """
    if adapter_files.is_adapter_folder(base):
        raise UserError("MODEL", f"{base} has adapters, not a model",
                        "name the model's folder first: jaxtrain adapters merge MODEL ADAPTERS --output=MERGED")
    section = hf_config.model_section(base)
    model = config_of(section)
    known = published_weights.by_full_name(safetensors_files.tensors_of(base), model)
    tensors = {tensor.name: tensor for tensor in known.values()}  # by the names that this folder has
    turned = adapter_files.is_turned(model)  # its matrices are [in, out]
    added: dict[str, list[Product]] = defaultdict(list)
    for folder, weight in adapters:
        adapter_files.warn_of_other_base(folder, base)
        for name, product in products(folder, model, weight).items():
            found = _checked(folder, name, known.get(name), product.shape[::-1] if turned else product.shape)
            added[found.name].append(product)

    def computed(name: str) -> np.ndarray:
        if name not in added:
            return tensors[name].view(DTYPES | OTHERS)
        whole = tensors[name].view()
        whole = (whole.T if turned else whole).astype(np.float32)
        found = whole + sum(product.added_to(whole) for product in added[name])
        return found.T if turned else found

    said = [{"folder": f"{folder}", "weight": weight} for folder, weight in adapters]
    rewritten_folder.write(Path(base), to, tensors, computed, section, {"base": f"{base}", "adapters": said}, dtype,
                           overwrite=overwrite, sources=[model_card.published_name(Path(base).resolve())])


def products(folder: Path, model: ModelConfig, weight: float) -> dict[str, Product]:
    """Return what the adapters in a folder add, by the name of the tensor they add it to."""
    said, tensors = adapter_files.described(folder), adapter_files.tensors_of(folder, model)
    adapter_files.check_dora(folder, said, tensors)
    found = {}
    for name, down in tensors.items():
        module = name.removesuffix(f".{adapter_files.DOWN}")
        up, magnitude = (tensors.get(f"{module}.{end}") for end in (adapter_files.UP, adapter_files.MAGNITUDE))
        if name.endswith((adapter_files.UP, adapter_files.MAGNITUDE)):
            continue
        if module == name or up is None or len(down.shape) != 2 or up.shape[1:] != down.shape[:1]:
            raise UserError(f"{folder}", f"its tensor {name} is not one of a pair lora_A [rank, in], lora_B [out, "
                            "rank]", "give plain LoRA adapters")
        found[f"{module}.weight"] = Product(down, up, magnitude, _scale(said, module, down.shape[0]), weight)
    return found


def _scale(said: JsonMapping, module: str, rank: int) -> float:
    """Return what PEFT multiplies the adapter of a module by."""
    alpha = next((value for pattern, value in (said.get("alpha_pattern") or {}).items()
                  if re.match(rf"(.*\.)?({pattern})$", module)), said["lora_alpha"])
    return alpha / (rank**0.5 if said.get("use_rslora") else rank)


def _checked(folder: Path, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor that is adapted, if it is there and has this shape."""
    if tensor is None:
        raise UserError(f"{folder}", f"it adapts {name}, which the model does not have", "give the model it is for")
    if tensor.shape != shape:
        raise UserError(f"{folder}", f"it adapts {name} of the shape {list(shape)} where the model has "
                        f"{list(tensor.shape)}", "give the model it is for")
    return tensor
