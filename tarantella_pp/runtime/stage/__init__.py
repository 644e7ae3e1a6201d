"""One stage of the pipeline: its layers, its traced graph cut in parts, compiled and run."""
