"""The library: tensors in, tensors out. It knows nothing of HTTP."""
