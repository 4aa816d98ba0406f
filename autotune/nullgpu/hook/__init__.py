"""What a child process finds first on its path, and PyTorch loads at the end of ``import torch``."""
