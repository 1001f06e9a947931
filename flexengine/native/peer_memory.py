"""GPU memory of one process in the address space of another, by handles of the CUDA driver.

Streams of the process that maps it copy to it as to memory of their own GPU, over NVLink or PCIe, and the other GPU's
context is not made. Reference: CUDA Driver API, "Unified Addressing" and cuIpcGetMemHandle, cuIpcOpenMemHandle,
cuIpcCloseMemHandle.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from flexengine.native.transfer import DRIVER_PATH
from flexengine.native.transfer_operations import RawMemory, byte_address

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, which calls take by value."""

    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class OfferedMemory(NamedTuple):
    """What another process maps a tensor by: the handle of the allocation that it lies in, and its place there."""

    handle: bytes
    offset: int
    num_bytes: int


class MappedMemory:
    """A tensor of another process; `close` unmaps it. Order: every copy to it has ended, and its owner has it still."""

    def __init__(self, driver: PeerDriver, base: int, memory: RawMemory) -> None:
        self.memory = memory
        self._driver, self._base = driver, base

    def close(self) -> None:
        """Unmap it; a second call does nothing. Raises: OSError with the driver's words."""
        base, self._base = self._base, 0
        if base:
            self._driver.call("cuIpcCloseMemHandle", ctypes.c_uint64(base))


class PeerDriver:
    """The calls of the driver, on the calling thread's context. Raises: OSError without the driver."""

    def __init__(self, path: str = DRIVER_PATH) -> None:
        self._library = ctypes.CDLL(path)

    def offer(self, memory: Tensor) -> OfferedMemory:
        """Make contiguous uint8 memory of this process's GPU known to others.

        Raises: OSError where it cannot be shared, as memory of some allocators.
        """
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        address = byte_address(memory)
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return OfferedMemory(bytes(memoryview(handle)), address - base.value, memory.numel())

    def map(self, offered: OfferedMemory) -> MappedMemory:
        """Map memory of another process. Raises: OSError where this GPU does not reach the other one."""
        base, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(offered.handle)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return MappedMemory(self, base.value, RawMemory(base.value + offered.offset, offered.num_bytes))

    def call(self, name: str, *arguments: object) -> None:
        """Call the driver. Raises: OSError with its words, or where it is too old for the call."""
        try:
            status = self._library[name](*arguments)
        except AttributeError:
            raise OSError(f"the CUDA driver has no {name}; it is too old") from None
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise OSError(f"{name}: CUDA driver error {status}: {(text.value or b'unknown error').decode()}")
