"""Triton settles at its import whether it interprets: here it does, unless a GPU run says ``TRITON_INTERPRET=0``."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
