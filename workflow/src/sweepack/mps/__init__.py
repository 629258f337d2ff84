"""NVIDIA's Multi-Process Service for cells that share a GPU: one daemon a device, opt-in, checked, torn down."""
