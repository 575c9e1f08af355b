"""alula: EAGLE-style speculative decoding, same text, sooner."""
