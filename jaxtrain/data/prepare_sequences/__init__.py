"""Prepare audio clips and event tables as sequences."""
