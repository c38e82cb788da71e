"""Print the ABI version of a libcutfuse.so; prebuilt.cmake calls this."""

import ctypes
import sys

try:
    library = ctypes.CDLL(sys.argv[1])
    function = library["_ZN7cutfuse11abi_versionEv"]  # int32_t cutfuse::abi_version() noexcept
except (OSError, AttributeError) as error:
    raise SystemExit(str(error)) from error
function.restype = ctypes.c_int32
print(function())
