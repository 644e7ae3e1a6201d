"""Prints which GPU each rank has taken."""

import os

import tarantella_pp as tnt

tnt.init()
gpu, growth = map(os.environ.get, ("CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH"))
print(f"rank {tnt.get_rank()} takes {gpu}, growth {growth}\n", end="")
