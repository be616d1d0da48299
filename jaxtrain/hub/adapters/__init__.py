"""Adapters (LoRA) as files in PEFT's format: read, written, merged into weights, versioned."""
