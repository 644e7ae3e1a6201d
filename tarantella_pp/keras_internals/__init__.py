"""The private names of Keras that this library needs, each held by a contract test."""
