"""How fast one core multiplies the matrices of a dense layer, of few rows and of many.

    python benchmarks/runtime/products.py
    TF_ENABLE_ONEDNN_OPTS=1 python benchmarks/runtime/products.py --widths 1000 1024

F is a layer's forward pass, B the gradient of its inputs, W that of its weights: three products
with as much arithmetic each. Printed are medians, and GFLOP/s. A batch that is cut in
micro-batches, or shared by replicas, is only as fast as products of fewer rows are.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
from rich.console import Console
from rich.table import Table

ROWS = (32, 64, 128, 256, 512)
REPEATS = 30


def seconds_of(left: tf.Tensor, right: tf.Tensor, **transposed: bool) -> float:
    """The median time of a product."""
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        tf.linalg.matmul(left, right, **transposed).numpy()
        found.append(time.perf_counter() - start)
    return statistics.median(found[REPEATS // 5 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", nargs="+", type=int, default=[1024])
    args = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    table = Table(title="Products of a dense layer on one core: ms, GFLOP/s")
    for head in ("width", "rows", "F", "B", "W", "all three"):
        table.add_column(head, justify="right")
    for width in args.widths:
        weights = tf.random.normal((width, width))
        for rows in ROWS:
            x, y = tf.random.normal((rows, width)), tf.random.normal((rows, width))
            each = [
                seconds_of(x, weights),
                seconds_of(y, weights, transpose_b=True),
                seconds_of(x, y, transpose_a=True),
            ]
            work = 2e-9 * rows * width**2
            cells = [f"{1e3 * s:.2f} {work / s:3.0f}" for s in each]
            total = sum(each)
            cells.append(f"{1e3 * total:.2f} {3 * work / total:3.0f}")
            table.add_row(str(width), str(rows), *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
