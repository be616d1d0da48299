"""Token mixers with a state in place of attention scores: recurrences over time, as products of matrices by chunk."""
