"""The common parts of pages, drawings and printed tables: style, tables, notebook display and words."""
