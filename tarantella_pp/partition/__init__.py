"""From a Keras model to a plan: layer graph, costs, solvers, plan and its pictures."""
