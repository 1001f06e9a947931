"""Triton kernels, one file per op of the same name. A file is imported when its op first meets a CUDA tensor.

Every public function is a launcher on torch tensors: it checks shapes and dtypes, launches on the current stream of the
current device, never synchronises and never allocates. Arithmetic is float32 inside, stored values are rounded once, to
nearest even unless said otherwise. No kernel is compiled for particular counts of tokens: a ragged batch would compile
it again and again. No kernel uses atomics: equal inputs of equal shape give equal bits.
"""

import os

# Triton 3.10 no longer fuses a product with the sum that follows it unless told to, which changes bits and speed.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
