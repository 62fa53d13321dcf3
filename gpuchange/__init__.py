"""gpuchange: change GPU servers host by host, resumable after any crash, rolled back with proof."""

__version__ = "0.1.0"
