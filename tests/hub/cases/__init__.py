"""The tiny models of all published types, as keys for transformers, by the name of the case."""

from tests.hub.cases import dense, hybrid, routed, state_models

CASES = dense.CASES | routed.CASES | hybrid.CASES | state_models.CASES
