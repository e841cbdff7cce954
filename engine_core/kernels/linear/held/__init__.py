"""Linears of few rows whose weight waits for them in shared memory."""
