"""Several tests and processes share a core: one thread each."""

import torch

torch.set_num_threads(1)
