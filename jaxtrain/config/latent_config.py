"""The fields of decoders with latent attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtrain.config.decoder_config import RotaryConfig
from jaxtrain.config.field_checks import at_most, derive, number
from jaxtrain.errors import UserError


@dataclass(frozen=True)
class LatentConfig(RotaryConfig):
    """Multi-head latent attention (MLA), whose heads turn in part."""

    # rank of the latent that queries are compressed to (q_lora_rank); 0: queries are not compressed
    q_rank: int = at_most(0, 2**20, least=0)
    # rank of the latent that keys and values are compressed to (kv_lora_rank)
    kv_rank: int = at_most(0, 2**20, least=0)
    # width of the part of a head with rotary positions, in addition to head_dim, which has none
    rope_head_dim: int = at_most(0, 2**16, least=0)
    value_head_dim: int = at_most(0, 2**16, least=0)  # width of a value head; 0: head_dim
    # epsilon of the norms of latents, which is 1e-6 in all published models; 0: norm_eps
    latent_norm_eps: float = number(0.0, least=0)
    latent_attention = True
    # parts of heads grow like head_dim
    widths: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **RotaryConfig.widths, "kv_rank": ("latent", "rank"), "rope_head_dim": (), "value_head_dim": ()}

    def __post_init__(self):
        super().__post_init__()
        if not self.kv_rank:
            raise UserError("model.kv_rank", f"{self.name} needs a latent", "give its width, such as 512")
        if "kv_rank" in self.mup_base and not self.q_rank:
            raise UserError("model.mup_base.kv_rank", "queries without a latent grow with embed_dim, and they have the "
                            "latents' logical axis", "leave it out, so that the latent grows like embed_dim")
        if self.rope_head_dim < 2 or self.rope_head_dim % 2:
            raise UserError("model.rope_head_dim", f"{self.rope_head_dim} is not a width that rotates",
                            "give an even number, such as 64")
        if self.num_kv_heads != self.num_heads:
            raise UserError("model.num_kv_heads", f"{self.num_kv_heads} differs from model.num_heads={self.num_heads}",
                            "set it to 0: latent attention has as many key and value heads as query heads")
        derive(self, "value_head_dim", self.head_dim)
        self._check_parts()

    @property
    def rotary_width(self) -> int:
        """The width of the part of a head that turns with its position."""
        return self.rope_head_dim or self.head_dim

    @property
    def attention_width(self) -> int:
        """The widths of a query and of a value in one head, together."""
        return self.head_dim + self.rope_head_dim + self.value_head_dim

    def attentions(self, seq_len: int) -> list[tuple[int, int, int, bool]]:
        """Return that of queries and keys with both of their parts."""
        return [(seq_len, 0, self.head_dim + self.rope_head_dim, True)]

    def _check_parts(self) -> None:
        """Refuse heads of which by `mup_base` one part grows and another one does not."""
        grown = self.growth.get("head_dim", 1)
        for key in ("rope_head_dim", "value_head_dim"):
            here, there = getattr(self, key), self.mup_base.get(key, 0)
            if not there and grown != 1 and (key, here) != ("value_head_dim", self.head_dim):
                raise UserError(f"model.mup_base.{key}", f"heads are {grown:g} times as wide as in the base, and it "
                                f"does not say what model.{key}={here} was there", "give that")
            if there and here != grown * there:
                raise UserError(f"model.{key}", f"{here} is {here / there:g} times its width in model.mup_base, and "
                                f"head_dim {grown:g} times", "let both grow by the same factor, or keep head_dim")
