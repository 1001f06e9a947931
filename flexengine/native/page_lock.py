"""Page-locking of host memory for the GPU's copy engines, and one clear message where it is refused.

Calls the CUDA driver, which is looked up at run time: unlike the CUDA runtime it does not repeat a failure at the next
kernel launch. Where the driver library cannot be opened by name, torch's binding of the runtime takes its place.
"""

import ctypes
from functools import cache
from typing import Any, Protocol

import torch

from flexengine.native.memory_limits import memlock_limit_bytes, pin_limit_bytes

GIB = 2**30
_DRIVER_LIBRARY = "libcuda.so.1"
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for every device of the process
_MAPPED = 2  # CU_MEMHOSTREGISTER_DEVICEMAP: kernels and streams may name its addresses
_LEAST_PROBE_BYTES = 2**20  # what is less than this is as good as nothing


class Pinner(Protocol):
    """Registers ranges of host memory with a GPU."""

    def register(self, address: int, num_bytes: int) -> str | None:
        """Page-lock a range; None, or why it was refused."""
        ...

    def unregister(self, address: int) -> None:
        """Undo a registration that began at `address`; never raises."""
        ...


def size_text(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({num_bytes / GIB:.2f} GiB)"


def check_pin_limit(num_bytes: int) -> None:
    """Raise MemoryError when more is asked for than the machine or container has: trying would end the process."""
    limit_bytes = pin_limit_bytes()
    if num_bytes > limit_bytes:
        raise MemoryError(
            f"cannot page-lock {size_text(num_bytes)} of host memory: RAM and the container's memory limit leave this "
            f"process {size_text(limit_bytes)} at most; lower the host budget or raise the container's limit"
        )


def lock_pages(address: int, num_bytes: int, pinner: Pinner | None = None) -> None:
    """Register a range with CUDA, so that the GPU copies from and to it directly.

    address, num_bytes: whole pages in RAM. pinner: default CUDA.
    Raises: MemoryError if it is refused, with what could have been registered (tried by halving, and released).
    """
    pinner = cuda_pinner() if pinner is None else pinner
    refusal = pinner.register(address, num_bytes)
    if refusal is None:
        return
    possible_bytes = _registrable_bytes(pinner, address, num_bytes)
    memlock_bytes = memlock_limit_bytes()
    memlock = "none" if memlock_bytes is None else size_text(memlock_bytes)
    raise MemoryError(
        f"CUDA cannot page-lock {size_text(num_bytes)} of host memory: {refusal}; {size_text(possible_bytes)} of it "
        f"could be locked. Known limits: RAM and container {size_text(pin_limit_bytes())}; `ulimit -l` {memlock}. "
        f"Raise the container's memory limit or `ulimit -l`, or lower the host budget"
    )


def unlock_pages(address: int, pinner: Pinner | None = None) -> None:
    """Undo `lock_pages`. Never raises."""
    (cuda_pinner() if pinner is None else pinner).unregister(address)


def _registrable_bytes(pinner: Pinner, address: int, num_bytes: int) -> int:
    """The largest of num_bytes / 2, / 4, ... that can be registered, and released again; 0 if not even 1 MiB can."""
    size_bytes = num_bytes // 2
    while size_bytes >= _LEAST_PROBE_BYTES:
        if pinner.register(address, size_bytes) is None:
            pinner.unregister(address)
            return size_bytes
        size_bytes //= 2
    return 0


@cache
def cuda_pinner() -> Pinner:
    """The driver's functions, or the runtime's where the driver library cannot be opened."""
    try:
        return DriverPinner(ctypes.CDLL(_DRIVER_LIBRARY))
    except (OSError, AttributeError):
        return RuntimePinner()


class DriverPinner:
    """cuMemHostRegister and cuMemHostUnregister of the CUDA driver API, which releases the interpreter lock.

    Raises: AttributeError if the library has them not.
    """

    def __init__(self, driver: Any) -> None:
        self._register = driver.cuMemHostRegister_v2
        self._register.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._unregister = driver.cuMemHostUnregister
        self._unregister.argtypes = (ctypes.c_void_p,)
        self._current_context = driver.cuCtxGetCurrent
        self._current_context.argtypes = (ctypes.POINTER(ctypes.c_void_p),)
        self._error_string = driver.cuGetErrorString
        self._error_string.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))

    def register(self, address: int, num_bytes: int) -> str | None:
        self._enter_context()
        status = self._register(address, num_bytes, _PORTABLE | _MAPPED)
        if status == 0:
            return None
        text = ctypes.c_char_p()
        self._error_string(status, ctypes.byref(text))
        return f"{(text.value or b'unknown error').decode(errors='replace')} (CUDA error {status})"

    def unregister(self, address: int) -> None:
        try:
            self._enter_context()
        except RuntimeError:  # after a failed kernel the context is lost, and its registrations with it
            return
        self._unregister(address)

    def _enter_context(self) -> None:
        """The driver works in the calling thread's context; torch makes its own current on a thread's first use."""
        context = ctypes.c_void_p()
        self._current_context(ctypes.byref(context))
        if not context:
            torch.cuda.synchronize()


class RuntimePinner:
    """cudaHostRegister and cudaHostUnregister of the CUDA runtime, by way of torch."""

    def register(self, address: int, num_bytes: int) -> str | None:
        cudart: Any = torch.cuda.cudart()  # functions of the CUDA runtime, untyped
        status = cudart.cudaHostRegister(address, num_bytes, _PORTABLE | _MAPPED)
        if int(status) == 0:
            return None
        _forget_runtime_error()
        return f"{cudart.cudaGetErrorString(status)} (CUDA error {int(status)})"

    def unregister(self, address: int) -> None:
        cudart: Any = torch.cuda.cudart()
        if int(cudart.cudaHostUnregister(address)) != 0:
            _forget_runtime_error()


def _forget_runtime_error() -> None:
    """The runtime repeats the last failure at the next kernel launch, whoever makes it: make one and let it fail."""
    try:
        torch.empty(1, device="cuda").fill_(0)
    except RuntimeError:
        return
