"""The client of a yard. Knows `model`, `wire` and `errors`, no part of a server.

Only `config` reads the environment.
"""
