"""GPT-2 for engine-core: the package that docs/write-a-plugin.md is written around."""
