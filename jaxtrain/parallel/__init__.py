"""Islands of explicit communication, each a `jax.shard_map` with a name."""
