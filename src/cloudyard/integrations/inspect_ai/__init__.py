"""inspect-ai's sandbox `cloudyard`: each sample of an evaluation gets a sandbox of a yard.

inspect-ai finds it by the entry point of that name; `docs/inspect.md` says how to use it. It knows the SDK
and inspect-ai's public interface.
"""

from cloudyard.integrations.inspect_ai.config import CloudyardConfig
from cloudyard.integrations.inspect_ai.environment import CloudyardSandbox

__all__ = ["CloudyardConfig", "CloudyardSandbox"]
