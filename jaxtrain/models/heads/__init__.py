"""Heads beside that of the next token: scalars for rewards and values, and the prediction of a second token."""
