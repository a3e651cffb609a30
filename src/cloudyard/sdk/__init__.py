"""The client of a yard. Knows `model`, `wire` and `errors`, and no part of a server; `config` alone reads the environment."""
