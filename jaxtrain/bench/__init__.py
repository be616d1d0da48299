"""Measure how fast a config trains on the available devices, where the time of a step goes, and what it needs.

    jaxtrain bench --config=configs/gpt.py --steps=20 --profile

`measurement` trains and times, `profile` reads a trace, `compare` alternates with other programs, `sweep` measures
combinations of keys, `records` keeps measurements as lines of JSON, and `tables` renders those as Markdown.
"""
