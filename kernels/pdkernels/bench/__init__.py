"""Measures the kernels and, for comparison, other ways to do the same work: python -m pdkernels.bench."""
