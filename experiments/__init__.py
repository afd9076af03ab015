"""Hydra-configured experiments over the engine and its kernels: `python -m experiments.run +suite=long_decode`."""
