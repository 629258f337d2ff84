"""Cells on several devices: their layout, their ranks, and the one place where the ranks meet."""
