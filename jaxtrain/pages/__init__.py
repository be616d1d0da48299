"""What all pages and pictures have in common: the style, tables, and what a notebook shows."""
