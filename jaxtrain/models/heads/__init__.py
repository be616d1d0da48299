"""What stands on the layers of a decoder beside its logits: heads of rewards and values, and of further tokens."""
