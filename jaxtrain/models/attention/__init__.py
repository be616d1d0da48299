"""Attention in models: projections and rotary positions, latent attention, and the cache of generation."""
