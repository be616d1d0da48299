"""Trace documents to the steps that see them, by inverting batches, and find documents by what they contain."""
