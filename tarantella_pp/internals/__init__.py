"""Private names of Keras and TensorFlow, each with a contract test."""
