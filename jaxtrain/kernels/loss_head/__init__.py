"""The loss head: cross-entropy, its kernel, and what is read off its logits besides."""
