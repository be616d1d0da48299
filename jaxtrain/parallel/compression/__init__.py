"""Compression of arrays that cross slow links: codecs with error feedback, their bytes, and sums over a mesh axis."""
