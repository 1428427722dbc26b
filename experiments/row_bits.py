"""Do torch's bfloat16 products give a row the same bits whatever the number of rows?

    ONEDNN_MAX_CPU_ISA=DEFAULT python experiments/row_bits.py
    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 python experiments/row_bits.py

The first rows of a batch are multiplied alone and compared with the same rows among 512, by
`F.linear` and with oneDNN's packed weights. Expect differences with matrix tiles (AMX), which the
first command allows where the processor has them, and none without.
"""

from __future__ import annotations

import os

import torch
from rich.console import Console

from interlace.experiments.exactness.ways import products_of

ROWS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 32, 48, 64, 100, 128, 256, 300)
MOST = 512
WEIGHTS = ((768, 512), (512, 512), (1024, 512), (8192, 512), (512, 2048))


def main() -> None:
    """Print, for each weight and way, the numbers of rows that change bits."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    console = Console(highlight=False)
    console.print(f"ONEDNN_MAX_CPU_ISA is {os.environ.get('ONEDNN_MAX_CPU_ISA', 'not set')}")
    with torch.inference_mode():
        for num_outputs, num_inputs in WEIGHTS:
            x = torch.randn(MOST, num_inputs).bfloat16()
            ways = products_of(torch.randn(num_outputs, num_inputs).bfloat16())
            for name, product in ways.items():
                whole = product(x)
                other = [n for n in ROWS if not torch.equal(product(x[:n].clone()), whole[:n])]
                told = f"others with {', '.join(map(str, other))} rows" if other else "the same"
                console.print(f"{num_inputs} to {num_outputs}, {name}: {told}")


if __name__ == "__main__":
    main()
