"""Tokenizers: bytes, characters, Hugging Face, tiktoken and SentencePiece."""
