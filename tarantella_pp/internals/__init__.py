"""Private names of Keras and TensorFlow, written against Keras 3.14 and 3.15.

`tests/internals` says, file by file, which of them a new version of Keras has changed.
"""
