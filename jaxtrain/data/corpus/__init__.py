"""Tokenised text on disk: its files, how they are written, opened and verified."""
