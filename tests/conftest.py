"""One thread a process: the tests' tensors are small, and some tests start processes of their own."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
