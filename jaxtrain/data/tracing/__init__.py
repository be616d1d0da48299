"""Which steps see a document: the batch of a step, inverted by arithmetic; and which documents contain a text."""
