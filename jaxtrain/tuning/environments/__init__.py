"""Environments of reinforcement learning: what the model talks to over several turns, such as tools and games."""
