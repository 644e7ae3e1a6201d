"""The partition problem and its certificate, as data."""
