"""The common parts of pages, pictures and printed tables: style, tables, notebook display and words."""
