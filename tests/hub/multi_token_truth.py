"""Compute with Hugging Face's transformers what multi-token prediction of tiny published models gives.

    python -m tests.hub.multi_token_truth    # writes tests/hub/multi_token_truth.json

Needs torch and transformers, which the tests do not. The layers are read by `MtpModel`, which transformers has for
generation. Kept are each layer's logits, the loss of the whole model with that of further tokens, and of each gradient
its norm and two projections. It computes in float64.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.modeling_layers import MtpModel

from tests.hub import multi_token, published, published_truth


def further(model: Any, folder: Path, layers: int) -> MtpModel:
    """The layers in a folder that predict further tokens, for a model."""
    config = model.config
    config.name_or_path = f"{folder}"
    if "qwen" in config.model_type:  # transformers reads no such layers of these types by itself
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    else:
        config.num_mtp_layers = layers
        model._keys_to_ignore_on_load_unexpected = [
            rf"model\.layers\.{config.num_hidden_layers + n}\." for n in range(layers)]
    return MtpModel.from_pretrained(model).to(torch.float64).eval()


def hidden_of(model: Any, ahead: MtpModel, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return what the output head reads: of the model, then of each further layer, with one token fewer each time."""
    found = [model.model(tokens).last_hidden_state]
    for n, layer in enumerate(ahead.layers, 1):
        before, embedded = found[-1][:, :-1], model.get_input_embeddings()(tokens[:, n:])
        length = before.shape[1]
        numbers = torch.arange(length)[None]
        mask = torch.full((length, length), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)[None, None]
        angles = model.model.rotary_emb(embedded, position_ids=numbers)
        found.append(layer(embedded, before, angles, mask, numbers, None))
    return found


def loss_of(logits: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of next tokens, and the weighted mean of those of further ones, by as many tokens."""
    sums = [torch.nn.functional.cross_entropy(each[:, :-1].reshape(-1, each.shape[-1]), tokens[:, 1 + n:].reshape(-1),
                                              reduction="sum") for n, each in enumerate(logits)]
    return (sums[0] + multi_token.LOSS_WEIGHT * sum(sums[1:]) / (len(sums) - 1)) / tokens[:, 1:].numel()


def gradients(model: Any, ahead: MtpModel, scratch: Path) -> dict[str, np.ndarray]:
    """All gradients, by the names of the tensors on disk."""
    def of(module: Any) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}

    found = published_truth.on_disk(model, scratch, of(model))
    last, qwen = len(model.model.layers) - 1, "qwen" in model.config.model_type
    for n, layer in enumerate(ahead.layers):
        other = copy.deepcopy(model)
        other.model.layers[last] = layer.mtp_block  # where it is saved by the names of a layer
        saved = published_truth.on_disk(other, scratch, of(other))
        to = "mtp.layers.0." if qwen else f"model.layers.{last + 1 + n}."
        found |= {name.replace(f"model.layers.{last}.", to): x for name, x in saved.items()
                  if name.startswith(f"model.layers.{last}.")}
        own = [("enorm", "pre_fc_norm_embedding"), ("hnorm", "pre_fc_norm_hidden"), ("eh_proj", "fc"),
               ("post_norm", "norm")] if qwen else [(name, name) for name in ("enorm", "hnorm", "eh_proj")] + [
                   ("post_norm", "shared_head.norm")]
        found |= {f"{'mtp.' if qwen else to}{theirs}.weight": getattr(layer, ours).weight.grad.numpy()
                  for ours, theirs in own}
    return found


def computed(name: str) -> dict[str, Any]:
    """Return what is kept of a case."""
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b, tempfile.TemporaryDirectory() as c:
        model = published_truth.torch_model(published.write(Path(a), published.truth(name)))
        tokens = torch.tensor(published.TOKENS, dtype=torch.long)
        ahead = further(model, multi_token.write(Path(b), name), multi_token.CASES[name])
        with published_truth.in_float64():
            logits = [model.lm_head(each) for each in hidden_of(model, ahead, tokens)]
            (loss := loss_of(logits, tokens)).backward()
        buffers = {name.split(".")[-1] for name, _ in model.named_buffers()}
        return {"logits": [[float(f"{x:.9g}") for x in each.detach().numpy().reshape(-1)] for each in logits[1:]],
                "loss": float(loss.detach()),
                "gradients": {name: [float(f"{x:.8g}") for x in published.projections(name, tensor)]
                              for name, tensor in gradients(model, ahead, Path(c)).items()
                              if name.split(".")[-1] not in buffers}}


def main() -> int:
    found = {name: computed(name) for name in multi_token.CASES}
    multi_token.TRUTH.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    print({name: each["loss"] for name, each in found.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
