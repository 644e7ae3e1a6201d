"""How a rank waits for others, and what has happened before a wait that does not end."""
