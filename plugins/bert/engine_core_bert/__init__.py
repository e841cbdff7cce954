"""BERT, RoBERTa and models of their shape for engine-core."""
