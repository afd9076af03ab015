"""The device side of the engine: weights, KV cache, batches, the forward pass and sampling."""
