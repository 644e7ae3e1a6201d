"""The data of a script on their way to the loops of Keras, on all ranks."""
