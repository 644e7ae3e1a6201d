"""Prints which GPU and cores each rank has taken."""

import os

import tarantella_pp as tnt

tnt.init()
gpu, growth = map(os.environ.get, ("CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH"))
cores = " ".join(map(str, sorted(os.sched_getaffinity(0))))
print(f"rank {tnt.get_rank()} takes {gpu}, growth {growth}, cores {cores}\n", end="")
