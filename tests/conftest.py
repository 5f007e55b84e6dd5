import torch

# Two busy threads a process are slower than one on a shared machine, and the tests' tensors are small.
torch.set_num_threads(1)
