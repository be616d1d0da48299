"""Reinforcement learning: prompts, answers of the model itself, and what they are worth."""
