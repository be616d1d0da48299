"""Models that are no decoders of text: one file a family."""
