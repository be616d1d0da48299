"""The same model, loss and update as `plain_jax.py` in PyTorch on CPU: what a careful person would write there.

Attention is torch's own, with a mask that keeps packed documents apart; AdamW is the fused one.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)  # eps 1e-5
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(h.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Twin(nn.Module):
    """Returns the summed loss of a packed batch and its weight."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocab: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.lnf = nn.LayerNorm(width)

    def forward(self, tokens, targets, segments, positions, weights):
        T = tokens.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        mask = (causal & (segments[:, :, None] == segments[:, None, :]))[:, None]
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.blocks:
            x = block(x, mask)
        logits = F.linear(self.lnf(x), self.wte.weight)
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (nll * weights.flatten()).sum(), weights.sum()


def from_jaxtrain(tree: Any) -> dict[str, torch.Tensor]:
    """jaxtrain's parameters (or gradients), a nested dict of arrays, by the names they have here."""
    layers, attention = tree["blocks"]["layer"], tree["blocks"]["layer"]["attention"]
    L, D = np.shape(layers["attention_norm"]["scale"])
    named = {"wte.weight": tree["embed"]["table"], "wpe.weight": tree["positions"]["table"],
             "lnf.weight": tree["norm"]["scale"], "lnf.bias": tree["norm"]["bias"]}

    def linear(name: str, layer: int, kernels: list, biases: list) -> None:
        weight = np.concatenate([np.asarray(kernel[layer]).reshape(rows, -1).T for kernel, rows in kernels])
        named[f"blocks.{layer}.{name}.weight"] = weight
        named[f"blocks.{layer}.{name}.bias"] = np.concatenate([np.asarray(bias[layer]).ravel() for bias in biases])

    for i in range(L):
        for ours, theirs in (("ln1", "attention_norm"), ("ln2", "mlp_norm")):
            named[f"blocks.{i}.{ours}.weight"] = layers[theirs]["scale"][i]
            named[f"blocks.{i}.{ours}.bias"] = layers[theirs]["bias"][i]
        linear("qkv", i, [(attention[x]["kernel"], D) for x in "qkv"], [attention[x]["bias"] for x in "qkv"])
        linear("out", i, [(attention["out"]["kernel"], D)], [attention["out"]["bias"]])
        up, down = layers["mlp"]["up"], layers["mlp"]["down"]
        linear("up", i, [(up["kernel"], D)], [up["bias"]])
        linear("down", i, [(down["kernel"], np.shape(down["kernel"])[1])], [down["bias"]])
    return {name: torch.from_numpy(np.array(value, np.float32)) for name, value in named.items()}


def tensors(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """A batch; indices are what torch likes them to be, ahead of time."""
    return {name: torch.from_numpy(np.array(value)).to(torch.float32 if name == "weights" else torch.int64)
            for name, value in batch.items()}


def learning_rate(hyper: Any, t: int) -> float:
    """Linear warm-up, then a cosine down to `final_fraction`."""
    if t < hyper.warmup_steps:
        return hyper.learning_rate * (t + 1) / hyper.warmup_steps
    after = min(1.0, (t - hyper.warmup_steps) / max(1, hyper.steps - hyper.warmup_steps))
    return hyper.learning_rate * ((1 - hyper.final_fraction) * 0.5 * (1 + math.cos(math.pi * after))
                                  + hyper.final_fraction)


def make_step(model: Twin, hyper: Any, compiled: bool = False):
    """`step(batch) -> loss`; the model is trained in place. `hyper` is `plain_jax.Hyper`."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": hyper.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=hyper.learning_rate, betas=(hyper.b1, hyper.b2), eps=hyper.eps, fused=True)
    forward = torch.compile(model) if compiled else model
    done = 0

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal done
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(hyper, done)
        total, weight = forward(**batch)
        loss = total / weight
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(matrices + vectors, hyper.clip_norm, foreach=True)
        optimizer.step()
        done += 1
        return loss.detach()

    return step
