"""Published weights: safetensors files, which tensor each parameter is, and whole folders of them."""
