"""The file formats that text and tokens are read from."""
