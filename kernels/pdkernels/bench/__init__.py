"""Measures the kernels beside other ways to do the same work: python -m pdkernels.bench."""
