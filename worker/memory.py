"""How a worker's memory stays what it is over days.

glibc gives threads arenas of their own, eight for each core, and an arena keeps the most that it
ever held. Workflows run on whichever thread is free, so every arena comes to hold as much as the
largest of them, and the process grows for as long as one is below that, with nothing in use.
"""

import ctypes
import os

ARENAS = 2
"""Allocations of a worker are few beside its waiting: they need not be apart from one another."""
_M_ARENA_MAX = -8


def limit_arenas() -> None:
    """Has glibc make no more than ARENAS, before there are threads. MALLOC_ARENA_MAX, where it is
    set, is what holds; other C libraries have no arenas.
    """
    libc = ctypes.CDLL(None)
    if "MALLOC_ARENA_MAX" not in os.environ and hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_ARENA_MAX, ARENAS)
