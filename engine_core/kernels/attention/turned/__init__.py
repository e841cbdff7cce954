"""Decode attention over codes, tokens as rows and a few heads as columns of its products."""
