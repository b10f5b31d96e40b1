"""The embedded family: two small Qwen3 models, their tokenizer, text and mappers."""
