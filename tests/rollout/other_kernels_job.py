"""`interlace rollout` as one rank of torchrun, on a host whose rank 1 has another processor."""

from __future__ import annotations

import os

from interlace.moe import kernels
from interlace.rollout.cli import main

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        kernels.native.use(kernels.native.choices()[-1])
        kernels.choose = lambda name: None
    main()
