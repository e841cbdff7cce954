"""InternLM2 and InternLM2.5 for engine-core."""
