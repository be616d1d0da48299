"""Answers as tokens: behind which prompts, and in which rows."""
