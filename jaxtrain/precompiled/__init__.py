"""Programs of a run that are compiled before it starts, on another machine too, and shipped in a signed folder."""
