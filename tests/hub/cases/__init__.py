"""The tiny models of all published types, as keys for transformers, by the name of the case."""

from tests.hub.cases import dense, hybrid, routed

CASES = dense.CASES | routed.CASES | hybrid.CASES
