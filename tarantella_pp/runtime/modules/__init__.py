"""What a stage computes with: layers, inputs and outputs, gradient accumulators."""
