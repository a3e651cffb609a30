"""The composition root: server configuration, the yard's processes, and the wiring of the real parts.

`config` says where a yard's things are; `children` finds, starts and watches one process; `supervisor` keeps
three of them running; `yard` raises and lowers the whole; `edge_main` and `control_main` wire those two. Only
this package builds the parts that the others define; nothing but the command line knows it.
"""
