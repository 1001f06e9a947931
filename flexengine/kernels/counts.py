"""Whole numbers of launches: Triton's own functions, called from the host, cost as much as a view of a tensor each."""


def cdiv(count: int, size: int) -> int:
    """Count the pieces of `size` that hold `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Find the least power of two that is at least `count`, which is positive."""
    return 1 << (count - 1).bit_length()


def stages_of_rows(row_bytes: int) -> int:
    """In two stages a loop over rows loads the next ones beside these, which takes shared memory: three rows of up to
    16 KiB fit that of any card."""
    return 2 if row_bytes <= 16384 else 1
