"""Uses of a trained or published model: generation, evaluation, adapters, merging and export."""
