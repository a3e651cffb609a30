"""Pure decisions: what should happen, given what is. No clock, no I/O, no randomness: those come in with the question."""
