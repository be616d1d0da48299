"""Filters, cleaning steps and removal of near duplicates."""
