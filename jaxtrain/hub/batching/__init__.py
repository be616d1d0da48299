"""Continuous batching: which texts are continued together, and what the programs of that do with rows."""
