"""One formula per file: what it reads and writes, forward, both halves of backward, FLOPs and bytes.

Every op has a plain-torch path that is right on the CPU in float32 and float64, and on CUDA calls the kernel of the
same file name in `flexengine.kernels`.
"""
