"""The program of ours that runs inside workers.

The edge never imports these files. It hands their text to the image's own Python (3.9 or later) on stdin, so
that nothing of it is on any disk. They run in one namespace, in the order of `FILES`, and see each other's
names there: their imports of each other are for type checkers alone. They may use nothing but the standard
library, and as little of that as they can, since every call finds in `sys.modules` what they have imported.
"""

from __future__ import annotations

from pathlib import Path

FILES = ("base", "walls", "program", "cell", "host")
TEXTS = tuple((name, Path(__file__).with_name(f"{name}.py").read_bytes()) for name in FILES)
BOOT = """import os, sys
host = {"__name__": "cloudyard_host"}
for size in map(int, sys.argv[1:]):
    text = b""
    while len(text) < size:
        more = os.read(0, size - len(text))
        if not more:
            os._exit(0)
        text += more
    exec(compile(text, "host", "exec"), host)
program = host["serve"]()
del host, size, text, more
try:
    code = exec(compile(program.text, program.path, "exec", dont_inherit=True), program.names) or 0
except BaseException as error:
    code = program.ended_by(error)
program.leave(code)
"""  # short, since its frame is below every frame of a call
ARGV = ("python3", "-c", BOOT, *(str(len(text)) for _, text in TEXTS))
STDIN = b"".join(text for _, text in TEXTS)
"""What the program reads before its first frame."""
