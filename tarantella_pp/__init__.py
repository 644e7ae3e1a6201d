"""Pipeline-parallel training of Keras 3 models on TensorFlow over MPI."""
