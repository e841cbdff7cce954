"""The cache's codes as numbers, for a kernel that takes no codes."""
