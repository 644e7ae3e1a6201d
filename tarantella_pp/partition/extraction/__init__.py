"""Reads a Keras model into a layer graph, with shapes, FLOPs and activations."""
