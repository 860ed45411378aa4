"""By how much a process grows during a call; plain Python, since the peers' interpreters import this very file."""

import ctypes
import pathlib
import resource
import sys
from collections.abc import Callable


def grown_bytes(call: Callable[[], object]) -> float:
    """Return by how many bytes the resident size of this process grows at most while it runs a call.

    Memory that earlier calls have freed is given back before, and the peak is forgotten. Where the system cannot do
    that, which Linux can, growth above the earlier peak is returned.

    Example:
        >>> grown_bytes(lambda: bytearray(2**26)) > 2**25
        True
    """
    status = pathlib.Path("/proc/self/status")
    try:
        ctypes.CDLL(None).malloc_trim(0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):
        unit = 1 if sys.platform == "darwin" else 1024
        peak = lambda: float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
        before = peak()
        call()
        return peak() - before

    def read(name: str) -> float:
        line = next(text for text in status.read_text().splitlines() if text.startswith(name))
        return 1024.0 * float(line.split()[1])

    before = read("VmRSS")
    call()
    return read("VmHWM") - before
