"""Pure decisions: what should happen, never the doing of it. No clock, I/O, randomness or logging."""
