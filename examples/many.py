"""Sixteen sandboxes at once, a command in the background of each. Needs a yard: `cloudyard up`."""

import anyio

import cloudyard


async def watch(box: cloudyard.Sandbox, index: int) -> None:
    counter = await box.start("for n in 1 2 3; do echo step $n; sleep 0.2; done")
    async for chunk in counter.stdout():
        print(f"{index:2} {box.id} {chunk!r}")
    done = await counter.wait()
    assert done.ok


async def main() -> None:
    async with cloudyard.connect() as yard:
        boxes = await yard.create_many(16, image="debian", memory="64MiB", max_ttl_s=300)
        async with anyio.create_task_group() as tasks:
            for index, box in enumerate(boxes):
                tasks.start_soon(watch, box, index)
        for box in boxes:
            await box.stop()


if __name__ == "__main__":
    anyio.run(main)
