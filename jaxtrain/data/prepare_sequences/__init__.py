"""Preparation of audio clips and event tables as sequences."""
