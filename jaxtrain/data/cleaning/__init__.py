"""Text quality filters, cleaning steps and near-duplicate removal."""
