"""The first minute: one sandbox, one command. Needs a yard: `cloudyard up`."""

import anyio

import cloudyard


async def main() -> None:
    async with cloudyard.connect() as yard, yard.sandbox(image="debian", cpu=1, memory="512MiB") as box:
        done = await box.run("echo $((6 * 7))", timeout_s=10)
        assert done.stdout == b"42\n"
        assert done.exit_code == 0
        print(done.text, end="")


if __name__ == "__main__":
    anyio.run(main)
