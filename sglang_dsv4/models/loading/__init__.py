"""How a stream reaches SGLang's parameters: source, plan, direct writer, proof of writing, and the session."""
