"""Policy gradients of a model with experts whose tokens take the routes that they took in the sampler."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import DataConfig, MeshConfig, TrainConfig
from jaxtrain.config.sections.tuning_keys import LoraConfig, PreferenceConfig, RLConfig
from jaxtrain.data.loading.batch_spec import SEQ, Array, Declared
from jaxtrain.errors import UserError
from jaxtrain.models.experts import given_routes
from jaxtrain.objectives.objective import of_sections
from jaxtrain.objectives.policy_gradient import PolicyGradient
from jaxtrain.train_step.state import Batch, Params, Skeleton

if TYPE_CHECKING:
    from jaxtrain.parallel.pipeline.stage_placement import Slots


@dataclass(frozen=True, kw_only=True)
class ReplayedPolicyGradient(PolicyGradient):
    """The clipped policy-gradient loss of answers, with the routes of experts that their sampler took."""

    layers: int

    @of_sections
    @classmethod
    def of(cls, skeleton: Skeleton, *, model: ModelConfig, train: TrainConfig, data: DataConfig, mesh: MeshConfig,
           lora: LoraConfig, preference: PreferenceConfig, rl: RLConfig) -> "ReplayedPolicyGradient":
        """Return the objective that these sections of a config describe."""
        if not model.experts.num:
            raise UserError("rl.replay_routes", f"{model.name} has no experts", "leave it out")
        if model.experts.score == "sparse_mixer":
            raise UserError("rl.replay_routes", f"the router of {model.name} chooses and weighs in one",
                            "leave it out, or set rl.exact=true")
        if model.experts.capacity_factor:
            raise UserError("rl.replay_routes", f"experts drop tokens by model.capacity_factor="
                            f"{model.experts.capacity_factor:g}, and the sampler drops none",
                            "set model.capacity_factor=0, or rl.exact=true")
        plain = PolicyGradient.of(skeleton, model=model, train=train, data=data, mesh=mesh, lora=lora,
                                  preference=preference, rl=rl)
        return cls(**vars(plain), layers=model.num_layers)

    @property
    def batch_spec(self) -> Declared:
        """The arrays of a policy gradient, and the experts of each token in each layer."""
        return {**super().batch_spec,
                given_routes.ROUTES: Array(np.int16, (SEQ, self.layers, self.experts_per_token))}

    def middle(self, params: Params, x_BTD: jax.Array, batch: Batch,
               slots: "Mapping[str, Slots] | None" = None) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """All layers that `params` holds, with the routes of the batch."""
        with given_routes.of(batch):
            return super().middle(params, x_BTD, batch, slots)
