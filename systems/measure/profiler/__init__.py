"""Reads traces of torch.profiler: kernels, calls of the host, communication."""
