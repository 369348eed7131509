"""One torch thread per process: two threads on a busy core are ten times slower than one."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
