"""What an edge has promised to its sandboxes, and whether one more fits. The edge's word is final,
whatever a placer thought.
"""

from __future__ import annotations

from cloudyard.edge.config import EdgeConfig
from cloudyard.errors import LimitExceeded
from cloudyard.model import EdgeLoad, SandboxSpec


class Admission:
    """Promises of cpu and memory, by sandbox. One call admits and notes it, so no two creates get the
    same room.
    """

    def __init__(self, config: EdgeConfig, sandboxes_max: int) -> None:
        self._cpu_max = config.cpu_total * config.cpu_overcommit
        self._memory_max = int(config.memory_total_bytes * config.memory_overcommit)
        self._sandboxes_max = sandboxes_max
        self._config = config
        self._promised: dict[str, tuple[float, int]] = {}
        self._cpu = 0.0
        self._memory = 0

    def admit(self, sandbox: str, spec: SandboxSpec) -> None:
        """Promise a sandbox what its spec asks for.

        Raises:
            LimitExceeded: it does not fit; the sentence says what is exceeded.
        """
        cpu, memory = spec.cpu, _bytes(spec)
        if len(self._promised) >= self._sandboxes_max:
            self._refuse(f"it holds {len(self._promised)} sandboxes, at most {self._sandboxes_max}")
        if self._cpu + cpu > self._cpu_max + 1e-9:
            self._refuse(
                f"{self._cpu:g} of {self._cpu_max:g} cores (overcommit included) are promised, "
                f"and {cpu:g} more do not fit"
            )
        if self._memory + memory > self._memory_max:
            self._refuse(
                f"{self._memory >> 20} of {self._memory_max >> 20} MiB of memory (overcommit included) are "
                f"promised, and {memory >> 20} more do not fit"
            )
        self.note(sandbox, spec)

    def note(self, sandbox: str, spec: SandboxSpec) -> None:
        """A sandbox that lives already, from before a restart, has its promise whether it fits or not."""
        self._promised[sandbox] = (spec.cpu, _bytes(spec))
        self._cpu += spec.cpu
        self._memory += _bytes(spec)

    def release(self, sandbox: str) -> None:
        """Take a promise back. Harmless when there is none."""
        cpu, memory = self._promised.pop(sandbox, (0.0, 0))
        self._cpu = (
            max(0.0, self._cpu - cpu) if self._promised else 0.0
        )  # no dust from adding and taking away
        self._memory -= memory

    def load(self, memory_available_bytes: int) -> EdgeLoad:
        """What is there and what is promised, for placement."""
        return EdgeLoad(
            cpu_total=self._cpu_max,
            memory_total_bytes=self._memory_max,
            cpu_promised=self._cpu,
            memory_promised_bytes=self._memory,
            sandboxes=len(self._promised),
            sandboxes_max=self._sandboxes_max,
            memory_available_bytes=memory_available_bytes,
        )

    def _refuse(self, why: str) -> None:
        raise LimitExceeded(
            f"Edge {self._config.edge} is full: {why}.",
            code="edge_full",
            fault="infra",
            hint="Stop some sandboxes, ask for less, or add a node.",
            retry_safe=True,
        )


def _bytes(spec: SandboxSpec) -> int:
    assert isinstance(spec.memory, int), "the spec is normalised"
    return spec.memory
