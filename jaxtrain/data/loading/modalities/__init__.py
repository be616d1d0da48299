"""Batches of what is not text: sequences of a prepared corpus, pictures, and how both are augmented."""
