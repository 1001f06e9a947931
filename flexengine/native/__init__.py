"""The one typed door to native code (csrc/), with a plain torch or operating-system path beside each function."""

from flexengine.native.host_memory import PAGE_BYTES, HostBuffer, allocate_host
from flexengine.native.memory_limits import pin_limit_bytes

__all__ = ["PAGE_BYTES", "HostBuffer", "allocate_host", "pin_limit_bytes"]
