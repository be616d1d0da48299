"""Conversations as tokens: chat templates, and masks of what is learnt."""
