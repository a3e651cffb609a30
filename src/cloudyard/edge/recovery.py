"""What an edge does before it serves: takes up what lives, settles what was under way, removes the rest.

This is the only clean-up that counts: whatever killed the edge before, after it the node holds what the
records say and nothing else. Decisions are in `core.reconcile`; NATS is not needed for any of it.
"""

from __future__ import annotations

import logging
import shutil

import anyio

from cloudyard.core.lifecycle import Adopted, Missing
from cloudyard.core.reconcile import Fate, OpenStep, Settlement, settle, triage
from cloudyard.edge.backends.base import Backend, Instance, InstanceFacts
from cloudyard.edge.journal import Journal
from cloudyard.edge.life import Yard
from cloudyard.edge.records import Answer, Intent
from cloudyard.edge.sandbox import Sandbox
from cloudyard.errors import CloudyardError
from cloudyard.wire.messages import REPEATABLE

CONNECTS_AT_ONCE = 64
DONE_TWICE_AS_ONCE = REPEATABLE | {
    "kill_all",
    "write_file",
}  # a restart frees the key of such a step: a repeat does it anew

log = logging.getLogger(__name__)


async def recover(yard: Yard, *, stalled_s: float) -> None:
    """Bring the node and the records together.

    Args:
        yard: empty so far.
        stalled_s: how long no edge was here.
    """
    alive: list[tuple[Sandbox, Instance]] = []
    missing: list[Sandbox] = []
    for journal in _load_all(yard):
        name = journal.head.sandbox
        match triage(journal.life.state, placed=journal.facts is not None, ended=journal.gone is not None):
            case Fate.REMEMBER:
                yard.remember(journal, journal.life)
            case Fate.FORGET:
                log.info("%s was being created when the edge ended; it is removed.", name)
                journal.file.path.unlink(missing_ok=True)
            case Fate.ADOPT:
                backend = yard.backends.get(journal.head.spec.backend)
                if backend is None:
                    log.error("%s has the backend %r, which is not here.", name, journal.head.spec.backend)
                    continue
                assert journal.facts is not None, "triage adopts only what was placed"
                sandbox = yard.hold(journal, backend)
                sandbox.settled.set()
                yard.admission.note(name, journal.head.spec)
                sandbox.instance = await _find(backend, journal.facts)
                if sandbox.instance is None:
                    missing.append(sandbox)
                else:
                    alive.append((sandbox, sandbox.instance))
    for backend in yard.backends.values():
        kept = {instance.facts.slot for sandbox, instance in alive if sandbox.backend is backend}
        for sentence in await backend.sweep(kept):
            log.info("Removed: %s", sentence)
    for sandbox in missing:
        _take_up_steps(sandbox)
        yard.apply(sandbox, Missing(cause="restart", at=yard.clock.wall()))
    places = anyio.CapacityLimiter(CONNECTS_AT_ONCE)
    async with anyio.create_task_group() as tasks:
        for sandbox, _instance in alive:
            tasks.start_soon(_adopt, yard, sandbox, stalled_s, places)
    _remove_stale_output(yard)


async def _find(backend: Backend, facts: InstanceFacts) -> Instance | None:
    try:
        return await backend.adopt(facts)
    except (CloudyardError, OSError) as exc:  # the sweep takes it; the others are not to wait for a repair
        log.error("%s could not be adopted: %s", facts.sandbox, exc)
        return None


def _load_all(yard: Yard) -> list[Journal]:
    journals: list[Journal] = []
    for path in sorted(yard.config.records_dir.iterdir()):
        if path.suffix != ".log":
            path.unlink()  # a rewrite that was not finished
            continue
        try:
            journal = Journal.peek(path) or Journal.load(path)
        except OSError as exc:
            log.error("The record %s cannot be read: %s.", path, exc.strerror)
            continue
        if journal is None:
            log.info("The record %s has not even a first entry; it is removed.", path)
            path.unlink()
        else:
            journals.append(journal)
    return journals


async def _adopt(yard: Yard, sandbox: Sandbox, stalled_s: float, places: anyio.CapacityLimiter) -> None:
    async with places:
        _take_up_steps(sandbox)
        connects = sandbox.life.state == "running"
        if not connects or await yard.connect(sandbox, "the edge was restarted", stalled_s=stalled_s):
            yard.apply(sandbox, Adopted(cause="restart", at=yard.clock.wall()))


def _take_up_steps(sandbox: Sandbox) -> None:
    """Hold every step that was under way, or end it. What became of commands is asked of the guest."""
    intents = dict(sandbox.journal.intents)
    steps = [
        OpenStep(step, command=intent.command is not None, repeatable=intent.op in DONE_TWICE_AS_ONCE)
        for step, intent in intents.items()
    ]
    fates = settle(steps, frozenset(step for step, intent in intents.items() if intent.command is not None))
    for number, fate in fates.items():
        try:
            _take_up(sandbox, intents[number], fate)
        except CloudyardError as exc:
            log.error("%s: step %d could not be settled: %s", sandbox.id, number, exc)


def _take_up(sandbox: Sandbox, intent: Intent, fate: Settlement) -> None:
    match fate:
        case Settlement.GO_ON:
            sandbox.commands.take_up(sandbox.steps.resume(intent), intent)
        case Settlement.RELEASE:
            sandbox.journal.append(Answer(intent.step, "", b""))
        case Settlement.LOST | Settlement.START:
            sandbox.steps.fail(
                sandbox.steps.resume(intent),
                CloudyardError(
                    f"The edge was restarted while step {intent.step} ({intent.op}) was under way in "
                    f"{sandbox.id}; whether it was done is not known.",
                    code="step_lost",
                    hint="Look whether it was done; a repeat needs a new key.",
                ),
            )


def _remove_stale_output(yard: Yard) -> None:
    for path in yard.config.output_dir.iterdir():
        if path.name not in yard.sandboxes:
            shutil.rmtree(path, ignore_errors=True)
            continue
        sandbox = yard.sandboxes[path.name]
        for file in path.iterdir():
            number = file.name.split(".")[0]
            if not number.isdigit() or (
                int(number) not in sandbox.history and int(number) not in sandbox.commands.live
            ):
                file.unlink(missing_ok=True)
