"""Readers of the file formats that hold text and tokens."""
