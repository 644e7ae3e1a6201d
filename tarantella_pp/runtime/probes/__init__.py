"""What is tried out before the first batch, to refuse what would train otherwise."""
