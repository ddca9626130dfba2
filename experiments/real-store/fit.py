"""Fits the times of `storage` to rows of `pdreal measure --only storage`: python experiments/real-store/fit.py ROWS.csv

A lookup of a batch takes the latency; a read or write takes the latency, and its bytes over the bandwidth. The sum of
squared relative errors is smallest. Prints the settings, and the error of each row.
"""

import csv
import sys
from pathlib import Path

import numpy as np

with Path(sys.argv[1]).open(encoding="utf-8") as file:
    rows = [row for row in csv.DictReader(file) if row["kind"] == "storage"]
times_us = np.array([float(row["time_us"]) for row in rows])
num_bytes = np.array([float(row["payload_bytes"]) for row in rows])
terms = np.stack(
    [np.ones(len(rows)), *([row["what"] == what for row in rows] * num_bytes for what in ("read", "write"))]
)
latency_us, *us_per_byte = np.linalg.lstsq((terms / times_us).T, np.ones(len(rows)), rcond=None)[0]
read, write = (f"{1e-3 / each:.2f} GB/s" for each in us_per_byte)
print(f"latency: {latency_us:.0f} us, read_bandwidth: {read}, write_bandwidth: {write}")
for row, time_us, fitted_us in zip(rows, times_us, terms.T @ [latency_us, *us_per_byte], strict=True):
    what = f"{row['what']} of {row['num_descriptors']} pages"
    print(f"{what:20} {time_us:9,.0f} us, fitted {fitted_us:9,.0f} us, {fitted_us / time_us - 1:+.0%}")
