"""The rules of published speech models: tokens around transcripts, languages, and the audio that they read."""
