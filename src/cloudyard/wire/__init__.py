"""Bytes to model and back, one file per wire: `guest` (edge and guest), `messages` (gateway and edge over
NATS, client and gateway over the mux socket). No I/O, no clock."""
