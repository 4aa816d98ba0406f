"""The first entry on a child process's path; PyTorch loads its modules at the end of ``import torch``."""
