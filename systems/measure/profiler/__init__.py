"""Runs nsys, and reads traces of torch.profiler: kernels, calls of the host, communication."""
