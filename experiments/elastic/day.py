"""Writes day.csv.gz, a made-up day in 32 minutes: long prompts in the morning, long answers later, quiet nights.

python experiments/elastic/day.py
"""

import gzip
from pathlib import Path
from random import Random

HERE = Path(__file__).parent
LEVEL_S = 240
LEVELS = (
    (0.7, 3000, 250),
    (4.0, 6000, 80),
    (4.0, 6000, 80),
    (2.0, 3000, 250),
    (6.0, 700, 1500),
    (6.0, 700, 1500),
    (1.5, 3000, 250),
    (0.5, 3000, 250),
)
"""Requests a second, prompt tokens and answer tokens of each level."""


def main() -> None:
    random, now_s, lines = Random(0), 0.0, ["arrival_s,in_tokens,out_tokens"]
    for i, (rate, prompt, answer) in enumerate(LEVELS):
        now_s = i * LEVEL_S
        while (now_s := now_s + random.expovariate(rate)) < (i + 1) * LEVEL_S:
            lengths = [round(mean * random.uniform(0.5, 1.5)) for mean in (prompt, answer)]
            lines.append(f"{now_s:.3f},{lengths[0]},{lengths[1]}")
    with gzip.GzipFile(HERE / "day.csv.gz", "w", mtime=0) as file:
        file.write(("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
