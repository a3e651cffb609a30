"""Stateless calls on this node: a warm pool of workers, and a cell in one of them for each call.

A *worker* (`worker`) is a sandbox of the container backend in which a small program of ours (`host`) has
imported what calls want to find imported. It forks a *cell* for each call: new pid, mount and ipc namespaces,
an empty /tmp, a user that no other call of that worker has had. `pool` keeps workers and gives them out,
`calls` makes a call of what a worker does, `judging` compares outputs. docs/design/functions.md says why.
"""

from __future__ import annotations

from cloudyard.edge.functions.calls import Functions

__all__ = ["Functions"]
