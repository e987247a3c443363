"""How a stream reaches SGLang's parameters: sources, the direct writer, the proof of writing, and the session that joins them."""
