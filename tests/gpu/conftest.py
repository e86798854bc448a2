"""One process has all GPU tests, and cuBLAS reads its settings at the first product of any."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
