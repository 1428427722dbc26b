"""Several tests and processes share a core: one thread each. Properties draw the same every time;
`pytest --hypothesis-profile long` looks further."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("quick", max_examples=50, deadline=None, derandomize=True, database=None)
settings.register_profile("long", max_examples=5000, deadline=None, print_blob=True)
settings.load_profile("quick")
