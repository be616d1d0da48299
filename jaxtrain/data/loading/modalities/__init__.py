"""Batches of what is not text: sequences of a prepared corpus, images, and how both are augmented."""
