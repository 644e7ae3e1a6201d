"""The public face: `PipelineModel`, its files, its checks, `make_plan`, `get_rank`."""
