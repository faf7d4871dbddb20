"""TALKING: joining a process group and the collectives on it; the only package that calls torch.distributed's."""
