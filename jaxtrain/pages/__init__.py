"""What pages, pictures and printed tables have in common: the style, tables, what a notebook shows, and words."""
