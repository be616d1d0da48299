"""Tokenised text on disk: the file format, and code to write, open and verify it."""
