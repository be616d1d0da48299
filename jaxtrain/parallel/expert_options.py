"""The options of how experts are computed, apart from that, so that a model without experts does not import it."""

from dataclasses import dataclass

from jaxtrain.config.schema import TrainConfig
from jaxtrain.sharding import products


@dataclass(frozen=True)
class ExpertOptions:
    """The options of how experts are computed; only `in_bf16` changes the result."""

    exchange: str = "auto"
    grouped_matmul: str = "auto"
    buffer: float = 1.25
    in_bf16: bool = False  # whether products stay as they are where those of other layers are in a narrow format

    @classmethod
    def of(cls, t: TrainConfig) -> "ExpertOptions":
        """Return what a config asks for."""
        return cls(t.expert_exchange, t.grouped_matmul, t.expert_buffer, t.experts_in_bf16)

    def narrow(self) -> str:
        """Return the narrow format in which products are traced here; "": as they are."""
        return "" if self.in_bf16 else products.current_format().kind


DEFAULT = ExpertOptions()
