"""Engines that write into the memory of another process, behind one protocol."""
