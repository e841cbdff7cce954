"""Experts of few tokens on a GPU."""
