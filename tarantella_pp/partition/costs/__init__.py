"""Memory and arithmetic of a stage, summed up from the nodes of a layer graph."""
