"""Measures the kernels beside other ways to do their work: python -m pdkernels.bench."""
