"""The options of how experts are computed, apart from that, so that a model without experts does not import it."""

from dataclasses import dataclass

from jaxtrain.config.schema import TrainConfig


@dataclass(frozen=True)
class ExpertOptions:
    """The options of how experts are computed; none of them changes the result."""

    exchange: str = "auto"
    grouped_matmul: str = "auto"
    buffer: float = 1.25

    @classmethod
    def of(cls, t: TrainConfig) -> "ExpertOptions":
        """Return what a config asks for."""
        return cls(t.expert_exchange, t.grouped_matmul, t.expert_buffer)


DEFAULT = ExpertOptions()
