"""The batch of every step: rows packed, shuffled, mixed and placed on the mesh."""
