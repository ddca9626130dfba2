"""Measures the kernels beside what else could do their work: python -m pdkernels.bench."""
