"""The last rank prints what options have told it; all of them log as the library does."""

import logging
import os
import sys

threads, gpu = os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES")
words = " ".join(repr(os.environ.get(name)) for name in ("GREETING", "B", "C"))
print(f"threads {threads}, {os.environ.get('A')} {words}, gpu {gpu}, -O {sys.flags.optimize}")
logging.getLogger("tarantella_pp.stage").info("info told")
logging.getLogger("tarantella_pp.stage").warning("warning told")
