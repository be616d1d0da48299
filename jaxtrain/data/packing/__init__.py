"""Packing documents into rows of one length: concatenated, best fit, whole pairs, or one document each."""
