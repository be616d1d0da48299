"""Tokenizers: bytes, Hugging Face, tiktoken and SentencePiece."""
