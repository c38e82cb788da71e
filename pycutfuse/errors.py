"""Exceptions and warnings of pycutfuse. Invalid calls raise torch's own exception types instead."""


class FallbackWarning(UserWarning):
    """The plain torch chain runs because the fused path does not support the call."""


class FallbackError(RuntimeError):
    """A call fell back although the fallback policy is ``"error"``."""


class LibraryUnavailableError(RuntimeError):
    """Something that only the native library can do was asked for, and it did not load."""
