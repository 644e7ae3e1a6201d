"""One stage of the pipeline, compiled; the only room that differentiates."""
