"""The version of flatmin, read by the build and by ``flatmin --version``."""

__version__ = "0.1.0"
