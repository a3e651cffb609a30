"""Stateless calls on this node: a warm pool of workers, and a cell in one of them for each run.

A *worker* (`worker`) is a sandbox of the container backend in which a small program of ours (`inside`) has
imported what calls want to find imported. It forks a *cell* for each run: new pid, mount and ipc namespaces,
an empty /tmp, a user that no other run in that worker has had. `pool` keeps workers and gives them out,
`programs` knows what a call runs and what came of it, `service` does it. docs/design/functions.md says why.
"""

from __future__ import annotations

from cloudyard.edge.functions.service import Functions

__all__ = ["Functions"]
