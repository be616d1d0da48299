"""Checks of the precisions whose products have few bits against the rest of a config (docs/training.md)."""

from typing import Any

from jaxtrain.base.narrow_formats import BLOCKS, NARROW
from jaxtrain.errors import UserError


def check(config: Any) -> None:
    """Refuse a `Config` with which its precision does not go."""
    train, kind = config.train, config.train.precision
    ends = {f"train.layers_at_{end}_in_bf16": value for end, value in (
        ("start", train.layers_at_start_in_bf16), ("end", train.layers_at_end_in_bf16))}
    for key, value in ends.items():
        if value and kind not in NARROW:
            raise UserError(key, f"it is read with train.precision={', '.join(NARROW)} only",
                            f"set one of them, or leave {key} out")
    if train.experts_in_bf16 and not (kind in NARROW and config.model.experts.num):
        raise UserError("train.experts_in_bf16", f"it is read with routed experts and train.precision="
                        f"{', '.join(NARROW)} only", "leave train.experts_in_bf16 out")
    if sum(ends.values()) > config.model.num_layers:
        raise UserError([*ends][1], f"both ends have {sum(ends.values())} layers, and model.num_layers is "
                        f"{config.model.num_layers}", "lower it")
    if config.lora.quantize and kind in NARROW:
        raise UserError("lora.quantize", f"train.precision={kind} rounds the weights of products itself",
                        "leave one of them out")
    if kind in BLOCKS and config.model.text:
        _check_blocks_of_tokens(config, BLOCKS[kind])
    if kind == "nvfp4":
        _check_random_numbers(config)


def _check_blocks_of_tokens(config: Any, block: int) -> None:
    """Refuse rows that are no whole blocks: the gradient of a weight sums over tokens, in blocks of them."""
    if config.data.seq_len % block:
        raise UserError("data.seq_len", f"{config.data.seq_len} is no multiple of {block}, the tokens of a block of "
                        f"train.precision={config.train.precision}", f"give a multiple of {block}")


def _check_random_numbers(config: Any) -> None:
    """Refuse what has no random numbers for stochastic rounding."""
    if not config.model.text:
        raise UserError("train.precision", "nvfp4 rounds gradients by random numbers of tokens, and "
                        f"model.name={config.model.name} is not a model of text alone", "use mxfp8")
    if config.mesh.stage > 1 and config.pipeline.schedule.startswith("zb"):
        raise UserError("pipeline.schedule", f"{config.pipeline.schedule} computes gradients of weights where "
                        "train.precision=nvfp4 has no random numbers to round by", "use 1f1b, or mxfp8")
