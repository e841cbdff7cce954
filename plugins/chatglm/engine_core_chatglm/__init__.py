"""ChatGLM-6B, ChatGLM2-6B and ChatGLM3-6B for engine-core."""
