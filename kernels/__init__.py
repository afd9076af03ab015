"""Decode, prefill and elementwise kernels: tensors in, tensors out (torch and triton only).

Kept import-light on purpose: transformers probes for an unrelated package of this name by
`find_spec` and version, and must be able to do so without importing torch code of ours.
"""
