"""What published speech models say beside their shapes: the tokens around transcripts, and languages."""
