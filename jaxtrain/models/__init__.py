"""Models: one file a family (config/family.py has the table), and the layers that families share."""
