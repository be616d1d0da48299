"""The section of a config that trains weights of which two in four are zero (docs/training.md)."""

from dataclasses import dataclass, field, fields
from typing import Any

from jaxtrain.config.field_checks import bounded, number
from jaxtrain.errors import UserError


@dataclass(frozen=True)
class SparsityConfig:
    """2:4 structured sparsity: of four neighbouring weights, the two of largest magnitude stay; off by default."""

    # linear layers to prune, as paths with wildcards; []: none
    targets: list[str] = field(default_factory=list, hash=False)
    # the step after which weights are sparse; or a fraction of train.steps
    start: int = number(1, above=0, of_steps=True)
    every: int = number(100, above=0)  # steps between updates of the mask
    # the last step at which the mask is updated; or a fraction of train.steps; 0: start
    stop: int = number(0, least=0, of_steps=True)
    decay: float = number(0.0, least=0)  # SR-STE: decay of masked weights, added to their gradient

    def __post_init__(self):
        bounded(self, "sparsity")
        if not all(isinstance(pattern, str) for pattern in self.targets):
            raise UserError("sparsity.targets", f"{self.targets} is not a list of paths",
                            "give ['blocks/*'] for all linear layers of the blocks")
        for spec in fields(self)[1:]:
            if not self.targets and getattr(self, spec.name) != spec.default:
                raise UserError(f"sparsity.{spec.name}", "it is read with sparsity.targets only",
                                f"set that too, or leave sparsity.{spec.name} out")
        if 1 <= self.stop < self.start:
            raise UserError("sparsity.stop", f"{self.stop} is before sparsity.start={self.start}",
                            f"give {self.start} or more, or 0")


def check(config: Any) -> None:
    """Refuse a `Config` with whose other sections sparsity does not go."""
    c = config.sparsity
    if c.targets and config.train.ema_decay:
        raise UserError("train.ema_decay", "an average of weights whose zeros move has fewer of them",
                        "leave it out, or sparsity.targets")
    if c.targets and config.diloco.count:
        raise UserError("diloco.count", "a mean over islands has fewer zeros than the weights of each",
                        "leave it out, or sparsity.targets")
    if c.targets and c.start > config.train.steps and not config.train.epochs:
        raise UserError("sparsity.start", f"{c.start} is behind train.steps={config.train.steps}, so that no weight "
                        "becomes sparse", "lower it")
