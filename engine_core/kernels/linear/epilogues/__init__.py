"""What a linear does with its products before they are stored."""
