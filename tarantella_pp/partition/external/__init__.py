"""Layer graphs that come from elsewhere than Keras, as JSON, and their plans."""
