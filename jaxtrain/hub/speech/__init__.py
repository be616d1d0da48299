"""Transcribe audio, and count the errors of transcripts."""
