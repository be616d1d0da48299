"""The objectives that a train step can minimise; `Run` takes one as it is and knows nothing else about it."""

from jaxtrain.objectives.objective import MakeObjective, Objective

# The key of a config, or its value, that asks for an objective -> where it is. The first one that applies counts.
ASKED = {
    "preference.loss=reward": "jaxtrain.objectives.reward_model:RewardModel",
    "preference.loss=kto": "jaxtrain.objectives.kto:Kto",
    "preference.loss": "jaxtrain.objectives.preference:Preference",
    "rl.exact": "jaxtrain.tuning.exact.exact_objective:ExactPolicyGradient",
    "rl.replay_routes": "jaxtrain.tuning.routes.replayed_objective:ReplayedPolicyGradient",
    "rl.prompts": "jaxtrain.objectives.policy_gradient:PolicyGradient",
}

__all__ = ["ASKED", "MakeObjective", "Objective"]
