"""Pure decisions: no clock, no I/O, no randomness, no logging. Whatever they need comes in with the call."""
