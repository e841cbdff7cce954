"""A family in full, small enough to break on purpose."""
