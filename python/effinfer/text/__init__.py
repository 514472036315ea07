"""Text to token ids and back: tokenizers, chat templates, the text of a request as it grows."""
