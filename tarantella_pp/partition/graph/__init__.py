"""The layer graph and what was measured of it, as data; no Keras."""
