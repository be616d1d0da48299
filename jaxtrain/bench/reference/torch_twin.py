"""GPT-2 and Llama in PyTorch, trained like jaxtrain trains them, as a careful person would write it.

Attention is PyTorch's own: with an exact mask that separates packed documents (FlexAttention where it is compiled for a
GPU), or only causal, like most published runs, which its flash kernels compute. AdamW is the fused one over float32
parameters; on GPUs activations are bfloat16 by autocast. `model` is the model section of jaxtrain's config.
"""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


class Attention(nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.heads, self.groups, self.width = model.num_heads, model.num_kv_heads, model.head_dim
        biased = model.name == "gpt2"
        wide = (self.heads + 2 * self.groups) * self.width
        self.qkv = nn.Linear(model.embed_dim, wide, bias=biased)
        self.out = nn.Linear(self.heads * self.width, model.embed_dim, bias=biased)

    def forward(self, x, mask, angles):
        B, T, _ = x.shape
        sizes = [self.heads * self.width, self.groups * self.width, self.groups * self.width]
        q, k, v = (part.view(B, T, -1, self.width).transpose(1, 2) for part in self.qkv(x).split(sizes, -1))
        if angles is not None:
            q, k = rotated(q, *angles), rotated(k, *angles)
        grouped = self.heads != self.groups
        if isinstance(mask, torch.Tensor) or mask is None:
            h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        else:
            h = flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
        return self.out(h.transpose(1, 2).reshape(B, T, -1))


class GeluMLP(nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.up, self.down = nn.Linear(model.embed_dim, model.mlp_dim), nn.Linear(model.mlp_dim, model.embed_dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGLU(nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.gate_up = nn.Linear(model.embed_dim, 2 * model.mlp_dim, bias=False)
        self.down = nn.Linear(model.mlp_dim, model.embed_dim, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        gpt2 = model.name == "gpt2"
        self.ln1, self.ln2 = make_norm(model), make_norm(model)
        self.attention, self.mlp = Attention(model), GeluMLP(model) if gpt2 else SwiGLU(model)

    def forward(self, x, mask, angles):
        x = x + self.attention(self.ln1(x), mask, angles)
        return x + self.mlp(self.ln2(x))


class Twin(nn.Module):
    """The decoder; returns the summed loss of a packed batch and its weight."""

    def __init__(self, model: Any, exact: bool = True, remat: bool = False):
        super().__init__()
        self.model, self.exact, self.remat = model, exact, remat
        gpt2 = model.name == "gpt2"
        self.wte = nn.Embedding(model.vocab_size, model.embed_dim)
        self.wpe = nn.Embedding(model.max_seq_len, model.embed_dim) if gpt2 else None
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.num_layers))
        self.lnf = make_norm(model)
        self.head = None if model.tied_embeddings else nn.Linear(model.embed_dim, model.vocab_size, bias=False)
        self.register_buffer("frequency", None if gpt2 else frequencies(model), persistent=False)

    def forward(self, tokens, targets, segments, positions, weights, mask=None):
        x, angles = self.wte(tokens), None
        if self.wpe is not None:
            x = x + self.wpe(positions)
        else:
            angle = positions[:, None, :, None] * self.frequency
            angles = angle.cos(), angle.sin()
        if torch.is_autocast_enabled(x.device.type):  # otherwise activations between layers would stay float32
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for block in self.blocks:
            if self.remat:
                x = torch.utils.checkpoint.checkpoint(block, x, mask, angles, use_reentrant=False)
            else:
                x = block(x, mask, angles)
        logits = F.linear(self.lnf(x), self.wte.weight if self.head is None else self.head.weight)
        nll = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return (nll * weights.flatten()).sum(), weights.sum()


def make_norm(model: Any) -> nn.Module:
    return (nn.LayerNorm if model.name == "gpt2" else nn.RMSNorm)(model.embed_dim, eps=model.norm_eps)


def frequencies(model: Any) -> torch.Tensor:
    """Return the rotary frequencies in radians per position, with Llama 3.1's scaling of the low ones."""
    f = model.rope_theta ** (-torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim)
    if model.rope_scaling != 1:
        low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
        kept = ((model.rope_original_len * f / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        f = f * (kept + (1 - kept) / model.rope_scaling)
    return f.float()


def rotated(x, cos, sin):
    """Rotate queries or keys [B, H, T, K], in the half-split convention."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x)


def make_mask(segments: torch.Tensor, blocks: bool = False) -> Any:
    """Return the causal mask within documents: for all pairs of tokens, or for blocks of them with FlexAttention.

    FlexAttention is fast where it is compiled, on GPUs. (Compiled for CPU, PyTorch 2.13's computes wrong results from
    rotated queries.)
    """
    B, T = segments.shape
    if blocks:
        def seen(b, h, q, k):
            return (q >= k) & (segments[b, q] == segments[b, k])

        return create_block_mask(seen, B, None, T, T, device=segments.device)
    causal = torch.ones(T, T, dtype=torch.bool, device=segments.device).tril()
    return (causal & (segments[:, :, None] == segments[:, None, :]))[:, None]


def from_jaxtrain(tree: Any) -> dict[str, torch.Tensor]:
    """Convert jaxtrain's parameters (or gradients), a nested dict of arrays, to the names used here."""
    layers, attention = tree["blocks"]["layer"], tree["blocks"]["layer"]["attention"]
    L, D = np.shape(layers["attention_norm"]["scale"])
    named = {"wte.weight": tree["embed"]["table"], **_norm("lnf", tree["norm"])}
    if "positions" in tree:
        named["wpe.weight"] = tree["positions"]["table"]
    if "output" in tree:
        named["head.weight"] = np.asarray(tree["output"]["kernel"]).T

    def linear(name: str, layer: int, parts: list, rows: int) -> None:
        """Join several of jaxtrain's layers that share their input into one linear layer."""
        kernels = [np.asarray(part["kernel"][layer]).reshape(rows, -1).T for part in parts]
        named[f"blocks.{layer}.{name}.weight"] = np.concatenate(kernels)
        if "bias" in parts[0]:
            biases = [np.asarray(part["bias"][layer]).ravel() for part in parts]
            named[f"blocks.{layer}.{name}.bias"] = np.concatenate(biases)

    for i in range(L):
        for ours, theirs in (("ln1", "attention_norm"), ("ln2", "mlp_norm")):
            named |= _norm(f"blocks.{i}.{ours}", {name: values[i] for name, values in layers[theirs].items()})
        linear("attention.qkv", i, [attention[x] for x in "qkv"], D)
        linear("attention.out", i, [attention["out"]], int(np.prod(np.shape(attention["out"]["kernel"])[1:-1])))
        mlp = layers["mlp"]
        if "gate" in mlp:
            linear("mlp.gate_up", i, [mlp["gate"], mlp["up"]], D)
        else:
            linear("mlp.up", i, [mlp["up"]], D)
        linear("mlp.down", i, [mlp["down"]], np.shape(mlp["down"]["kernel"])[1])
    return {name: torch.from_numpy(np.array(value, np.float32)) for name, value in named.items()}


def _norm(name: str, ours: Any) -> dict[str, Any]:
    return {f"{name}.weight": ours["scale"], **({f"{name}.bias": ours["bias"]} if "bias" in ours else {})}


def tensors(batch: dict[str, Any], device: str = "cpu") -> dict[str, torch.Tensor]:
    """Convert a batch to tensors, with int64 indices as PyTorch prefers."""
    kinds = {"weights": torch.float32}
    return {name: torch.from_numpy(np.array(value)).to(device, kinds.get(name, torch.int64))
            for name, value in batch.items()}


def learning_rate(hyper: Any, t: int) -> float:
    """Return the learning rate: linear warm-up, then a cosine down to `final_fraction`."""
    if t < hyper.warmup_steps:
        return hyper.learning_rate * (t + 1) / hyper.warmup_steps
    after = min(1.0, (t - hyper.warmup_steps) / max(1, hyper.steps - hyper.warmup_steps))
    return hyper.learning_rate * ((1 - hyper.final_fraction) * 0.5 * (1 + math.cos(math.pi * after))
                                  + hyper.final_fraction)


def make_step(model: Twin, hyper: Any, compiled: bool = False, accumulation: int = 1):
    """Return `step(batch) -> loss`, which trains the model in place; `hyper` is a `plain_jax.Hyper`."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": hyper.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=hyper.learning_rate, betas=(hyper.b1, hyper.b2), eps=hyper.eps, fused=True)
    device = next(model.parameters()).device.type
    forward = torch.compile(model) if compiled else model
    blocks = compiled and device == "cuda"
    masked = partial(torch.compile(make_mask), blocks=True) if blocks else make_mask
    done = 0

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal done
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(hyper, done)
        whole, total = batch["weights"].sum(), torch.zeros((), device=batch["weights"].device)
        for part in range(accumulation):  # rows part, part + accumulation, ..., as in jaxtrain
            micro = {name: rows[part::accumulation] for name, rows in batch.items()}
            mask = masked(micro["segments"]) if model.exact else None
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                summed, _ = forward(**micro, mask=mask)
            loss = summed / whole
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(matrices + vectors, hyper.clip_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # not at the start of a step: the memory is needed before
        done += 1
        return total

    return step
