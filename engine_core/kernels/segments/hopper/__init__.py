"""Attention within segments, in Gluon for Hopper."""
