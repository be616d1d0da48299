"""Routes of experts that are replayed from the sampler to the trainer (`rl.replay_routes`)."""
