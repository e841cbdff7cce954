"""A family that sees, small enough to break on purpose."""
