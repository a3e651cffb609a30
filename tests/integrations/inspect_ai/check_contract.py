"""inspect-ai's own check of a sandbox provider, all of it, with nothing marked as known to fail."""

from inspect_ai.util._sandbox.self_check import *  # noqa: F403
