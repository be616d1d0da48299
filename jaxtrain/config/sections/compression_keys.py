"""The section of a config that compresses gradients where they cross a slow link (docs/parallelism.md)."""

from dataclasses import dataclass, fields
from typing import Any

from jaxtrain.config.field_checks import at_most, bounded, choice, number
from jaxtrain.config.sections.tuning_keys import OF_ANSWERS
from jaxtrain.errors import UserError

# The keys that each method reads, besides the axis.
READ_BY = {"exact": "", "int8": "block", "int4": "block", "top_k": "block ratio", "random_k": "ratio",
           "power_sgd": "rank"}


@dataclass(frozen=True)
class CompressionConfig:
    """Gradient compression over one slow mesh axis, with error feedback; off by default."""

    # format of gradients on the slow axis: exact (float32, sent once per step), int8, int4, top_k, random_k or
    # power_sgd; "": no compression
    method: str = choice("", "", *READ_BY)
    # the mesh axis that is the slow link: it must split the batch, and no parameters
    axis: str = choice("data", "data", "fsdp")
    block: int = at_most(0, 2**24, least=0)  # block size in values; 0: 256 (int8), 64 (int4), 4096 (top_k)
    # top_k, random_k: the share of values that is sent
    ratio: float = number(0.01, above=0, most=1.0, fix="try 0.01")
    rank: int = at_most(4, 2**16, above=0)  # power_sgd: rank of the two factors of each matrix

    def __post_init__(self):
        bounded(self, "compression")
        read = {"axis" if self.method else "", *READ_BY.get(self.method, "").split()}
        for spec in fields(self)[1:]:
            if getattr(self, spec.name) != spec.default and spec.name not in read:
                raise UserError(f"compression.{spec.name}", f"compression.method={self.method!r} does not read it",
                                "leave it out, or choose another method")
        if self.block % 2 or self.block > 2**16:
            raise UserError("compression.block", f"{self.block} is odd or above 65536", "try 256")


def check(config: Any) -> None:
    """Refuse a `Config` with whose other sections compression does not go."""
    if not config.compression.method:
        return
    for key, value, reason in (
            ("rl.prompts", config.rl.prompts, "rewards are compared over the whole batch"),
            ("preference.loss", config.preference.loss in OF_ANSWERS,
             f"{config.preference.loss} compares answers of the whole batch"),
            ("optimizer.zero_stage", config.optimizer.zero_stage > (2 if config.compression.method == "exact" else 0),
             "what is spread over data crosses it whole")):
        if value:
            raise UserError(key, f"{reason}, and compression.method={config.compression.method} sums gradients that "
                            "each part of the mesh made by itself", "leave one of them out")
