"""Read the files that the folder of a published model has beside its weights."""
