"""How the C library keeps memory that a CPU engine frees and asks for again a moment later."""

from __future__ import annotations

import ctypes
import functools

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT = 256 << 20


@functools.cache
def keep_freed_memory() -> bool:
    """Let glibc keep up to 256 MiB of freed memory, and serve up to 32 MiB at once from it; False without glibc.

    By default it hands activations back to the operating system at once, and every pass takes them anew, page by
    page: a tenth of a small model's update.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {_M_MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD, _M_TRIM_THRESHOLD: _KEPT, _M_TOP_PAD: 16 << 20}
    return all([mallopt(option, value) == 1 for option, value in settings.items()])
