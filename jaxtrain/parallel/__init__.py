"""Parallelism with explicit communication: each module is a manual region (`jax.shard_map`)."""
