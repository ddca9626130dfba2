"""Times SGLang's own swap-in kernel on this machine: python measure.py hisparse.cuh rows.csv

hisparse.cuh: sglang/kernels/jit/csrc/kvcacheio/hisparse.cuh of the wheel of SGLang 0.5.23. Needs nvcc and a GPU.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
SPANS = (
    ("#ifdef USE_ROCM\nconstexpr int WARP_SIZE", "template <int BLOCK_SIZE>\n__global__"),
    ("__device__ __forceinline__ int warp_inclusive_scan", "void load_cache_to_device_buffer(\n"),
    ("// Copy-only swap-in for shared-index", "void copy_cache_planned(\n"),
)
"""Beginning and end of each part of the file that needs nothing of SGLang's other files. Before each end but the first
are the template parameters of a function that is left out.
"""


def kernel_of(text: str) -> str:
    """The two kernels and what they call."""
    first, *others = [text[text.index(begin) : text.index(end)] for begin, end in SPANS]
    return "\n".join([first, *(part[: part.rindex("template <")] for part in others)])


def main(source: str, rows: str) -> None:
    with TemporaryDirectory() as folder:
        kernel, program = Path(folder) / "kernel.cuh", Path(folder) / "swap_in"
        kernel.write_text(kernel_of(Path(source).read_text()))
        build = [
            "nvcc",
            "-arch=sm_90",
            "-std=c++20",
            "-O3",
            f'-DKERNEL="{kernel}"',
            str(HERE / "swap_in.cu"),
            "-o",
            program,
        ]
        subprocess.run(build, check=True)  # noqa: S603
        Path(rows).write_text(subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True).stdout)  # noqa: S603


if __name__ == "__main__":
    main(*sys.argv[1:])
