"""Several tests and processes share a core: one thread each. Whatever test comes first, oneDNN's
products are those of a rank. Properties draw the same every time; `pytest --hypothesis-profile
long` looks further."""

import torch
from hypothesis import settings

from interlace.moe.linear import keep_to_row_stable_kernels

torch.set_num_threads(1)
keep_to_row_stable_kernels()
settings.register_profile("quick", max_examples=50, deadline=None, derandomize=True, database=None)
settings.register_profile("long", max_examples=5000, deadline=None, print_blob=True)
settings.load_profile("quick")
