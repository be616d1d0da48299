"""Sections of a config that most runs leave alone: one file each."""
