"""The host side of the engine: which request runs what, and in which KV blocks. No tensors, no torch."""
