"""Tells which tensors and source lines need memory, and draws GPU memory over time."""
