# SPDX-License-Identifier: Apache-2.0
"""A node of a ps-lite job that computes (sleeps) and exchanges in turn, until it is killed.

    python training_node.py LIBRARY KEYS BYTES COMPUTE_S

LIBRARY is a libpslite_job.so. Servers are at 127.0.0.2. Workers print a line per iteration.
"""

import ctypes
import os
import sys
import time


def main(library: str, keys: int, size: int, compute_s: float) -> None:
    """Until killed."""
    role = os.environ["DMLC_ROLE"]
    if role == "server":
        os.environ["DMLC_NODE_HOST"] = "127.0.0.2"
    lib = ctypes.CDLL(library)
    rank = lib.pslite_start()
    size_, one = ctypes.c_int64(size), ctypes.create_string_buffer(2 * keys * size)
    if role == "scheduler":
        time.sleep(3600)
    elif role == "worker":
        other = ctypes.create_string_buffer(keys * size)
        lib.pslite_worker(keys, size_, one, other)
        lib.pslite_barrier()
        while True:
            time.sleep(compute_s)
            lib.pslite_exchange()
            print("iteration", flush=True)
    else:
        mine = len(range(rank, keys, int(os.environ["DMLC_NUM_SERVER"])))
        lib.pslite_server(mine, size_, one)
        lib.pslite_barrier()
        served = 0
        while True:
            served += 1
            lib.pslite_serve(ctypes.c_int64(served))
            lib.pslite_release(ctypes.c_int64(served))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
