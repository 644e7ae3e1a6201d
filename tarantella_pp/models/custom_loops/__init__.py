"""For training loops of your own: values of all ranks combined, gradients averaged."""
