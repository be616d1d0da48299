"""What a train step can minimise: objectives, which a `Run` takes as they are and knows nothing else about."""

from jaxtrain.objectives.next_token import NextToken
from jaxtrain.objectives.objective import MakeObjective, Objective

__all__ = ["MakeObjective", "NextToken", "Objective"]
