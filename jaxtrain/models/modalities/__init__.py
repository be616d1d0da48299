"""Models that are not decoders of text: one file a family."""
