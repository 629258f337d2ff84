"""How much GPU memory a cell takes, known before the run: an estimate, a measurement, and the pins that keep it."""
