"""Graphs with too many ideals to list: local search, lower bounds, minimum cuts."""
