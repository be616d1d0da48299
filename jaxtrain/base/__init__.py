"""The ground that every part stands on; it imports nothing but errors."""
