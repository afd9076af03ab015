"""Decode steps of few rows, all layers in one launch: see kernels/persistent/layers.py."""

from kernels.persistent.layers import (
    MAX_ROWS,
    LayerShape,
    LayerTile,
    PersistentLayers,
    unsupported_block_size,
)

__all__ = ["MAX_ROWS", "LayerShape", "LayerTile", "PersistentLayers", "unsupported_block_size"]
