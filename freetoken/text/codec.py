"""TextCodec: the tokenizer and chat template of one model, together. Placeholder for the seam's signature."""
