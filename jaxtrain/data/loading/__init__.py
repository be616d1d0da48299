"""The data loader: rows packed, shuffled, mixed, cut into the batch of every step, and placed on the mesh."""
