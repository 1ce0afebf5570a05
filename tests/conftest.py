"""One thread a test process: small tensors on many threads, beside other processes, are slower by far."""

import torch

torch.set_num_threads(1)
