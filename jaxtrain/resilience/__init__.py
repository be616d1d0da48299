"""Fault tolerance: what keeps a run alive, or ends it well. Must not import JAX, which the supervisor does without."""
