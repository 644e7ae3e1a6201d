"""The plan: its data and JSON, its checks, its table, its simulation."""
