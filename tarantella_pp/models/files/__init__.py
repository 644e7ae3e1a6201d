"""Files of whole models: written by one rank, and read by each in parts."""
