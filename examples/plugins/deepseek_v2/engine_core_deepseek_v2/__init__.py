"""DeepSeek-V2 and V3 for engine-core: latent attention and groups of experts."""
