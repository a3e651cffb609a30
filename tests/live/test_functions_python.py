"""Programs in a call behave as they do elsewhere: Python as under `python3 main.py`, the shell as `/bin/sh`."""
# ruff: noqa: E501 (each row of a table is one program and how it ends)

from __future__ import annotations

import pytest

from functions_kit import Calls

pytestmark = pytest.mark.live


@pytest.mark.parametrize(
    ("code", "exit_code", "stdout", "stderr"),
    [
        ("raise SystemExit", 0, "", ""),
        ("raise SystemExit(3)", 3, "", ""),
        ("raise SystemExit(True)", 1, "", ""),
        ("raise SystemExit(256 + 4)", 4, "", ""),
        ("raise SystemExit(-1)", 255, "", ""),
        ("raise SystemExit(-2)", 254, "", ""),
        ("raise SystemExit('sorry')", 1, "", "sorry\n"),
        ("raise SystemExit(None)", 0, "", ""),
        ("raise SystemExit({'a': 1})", 1, "", "{'a': 1}\n"),
        ("import sys; print('out'); sys.exit(2)", 2, "out\n", ""),
        ("import os; print('lost'); os._exit(5)", 5, "", ""),
        ("import atexit; atexit.register(print, 'bye'); print('hi')", 0, "hi\nbye\n", ""),
        ("import threading; threading.Thread(target=lambda: print('thread')).start()", 0, "thread\n", ""),
        ("import os; os.fork() or os._exit(0); os.wait(); print('parent')", 0, "parent\n", ""),
        ("print(__name__, __file__, __spec__, __builtins__.__name__)", 0, "__main__ /tmp/main.py None builtins\n", ""),
        ("import sys; print(sys.argv, sys.path[0], sys.stdin.isatty())", 0, "['main.py'] /tmp False\n", ""),
        ("import __main__; x = 1; print(__main__.x)", 0, "1\n", ""),
        ("import os; print(os.getcwd(), os.environ['HOME'], os.umask(0))", 0, "/tmp /tmp 18\n", ""),
        ("print('é漢字🦊'); import sys; print(sys.stdout.encoding)", 0, "é漢字🦊\nutf-8\n", ""),
        ("import sys; sys.stderr.write('é')", 0, "", "é"),
        ("from __future__ import annotations\ndef f(x: Nope): ...\nprint(f.__annotations__)", 0, "{'x': 'Nope'}\n", ""),
        ("print(open('/dev/stdin').read())", 0, "input\n", ""),
        ("print(open(0).read())", 0, "input\n", ""),
        ("open('/dev/stdout', 'w').write('out'); open('/dev/stderr', 'w').write('err')", 0, "out", "err"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1)'], check=True)", 0, "1\n", ""),
        ("import pty; a, b = pty.openpty(); print('pty')", 0, "pty\n", ""),
        ("import multiprocessing as m\nif __name__ == '__main__':\n    print(m.get_context('fork').Pool(2).map(abs, [-1, 2]))", 0, "[1, 2]\n", ""),
        ("import multiprocessing as m\nif __name__ == '__main__':\n    print(m.get_context('spawn').Pool(1).map(abs, [-1, 2]))", 0, "[1, 2]\n", ""),
        ("import tempfile; print(tempfile.gettempdir())", 0, "/tmp\n", ""),
        ("class A:\n    def __del__(self): print('gone')\na = A()", 0, "gone\n", ""),
        ("open('f', 'w').write('x'); import logging; logging.warning('w')", 0, "", "WARNING:root:w\n"),
        ("import sys; sys.stdout.close()", 0, "", ""),
        ("import sys; sys.stdout = None; sys.stderr = None", 0, "", ""),
        ("import os, sys; print(open('/proc/self/cmdline').read().rstrip('\\0').split('\\0'))", 0, "['python3', 'main.py']\n", ""),
        ("import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start(); print(1)", 0, "1\n", ""),
        ("import random, sys; print('random' in sys.modules)", 0, "True\n", ""),
    ],
)  # fmt: skip
async def test_it_is_as_under_python_itself(
    calls: Calls, code: str, exit_code: int, stdout: str, stderr: str
) -> None:
    done = await calls(code, stdin=b"input")
    assert (done.stderr.decode(), done.text, done.exit_code, done.signal) == (stderr, stdout, exit_code, None)


async def test_a_traceback_shows_the_user_s_lines_and_no_other(calls: Calls) -> None:
    done = await calls("def f(n):\n    return f(n - 1) if n else 1 / 0\n\nf(3)\n")
    text = done.stderr.decode()
    assert done.exit_code == 1
    assert text.startswith(
        'Traceback (most recent call last):\n  File "/tmp/main.py", line 4, in <module>\n    f(3)\n'
    )
    assert text.endswith("ZeroDivisionError: division by zero\n")
    assert text.count("File ") == text.count('File "/tmp/main.py"') == 4  # and a line repeated


async def test_a_syntax_error_shows_its_line_and_no_frame_of_ours(calls: Calls) -> None:
    done = await calls("x = 1\nif x\n    pass\n")
    assert done.exit_code == 1
    assert done.stderr.decode().startswith('  File "/tmp/main.py", line 2\n    if x\n')


async def test_endless_recursion_is_an_exception(calls: Calls) -> None:
    done = await calls("def f(): f()\nf()")
    assert done.exit_code == 1
    assert done.stderr.decode().rstrip().endswith("RecursionError: maximum recursion depth exceeded")


async def test_exceptions_at_exit_and_in_threads_are_told(calls: Calls) -> None:
    done = await calls("import atexit\n@atexit.register\ndef bye(): raise ValueError('late')\nprint(1)")
    assert (done.text, b"ValueError: late" in done.stderr, done.exit_code) == ("1\n", True, 0)
    done = await calls(
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\nprint(2)"
    )
    assert (done.text, b"ZeroDivisionError" in done.stderr, done.exit_code) == ("2\n", True, 0)


async def test_chained_exceptions_and_hooks_work(calls: Calls) -> None:
    done = await calls(
        "try:\n    1 / 0\nexcept ZeroDivisionError as exc:\n    raise ValueError('x') from exc"
    )
    assert b"direct cause" in done.stderr
    assert b"<string>" not in done.stderr
    done = await calls("import sys\nsys.excepthook = lambda *_: print('mine')\n1 / 0")
    assert (done.text, done.stderr, done.exit_code) == ("mine\n", b"", 1)


async def test_binary_output_and_names_in_any_script_come_through(calls: Calls) -> None:
    done = await calls(
        "import os, sys\nsys.stdout.buffer.write(open('dätei/漢字.txt', 'rb').read())\nopen(b'\\xff\\xfe', 'w').close()",
        files={"dätei/漢字.txt": bytes(range(256))},
    )
    assert (done.stdout, done.stderr) == (bytes(range(256)), b"")
    done = await calls("import sys\nprint(sys.argv[1:])", args=["é", "", "a b", "漢"])
    assert done.text == "['é', '', 'a b', '漢']\n"


async def test_source_in_other_encodings_and_shapes_runs(calls: Calls) -> None:
    assert (await calls("\ufeffprint('bom')")).text == "bom\n"
    assert (await calls("print('crlf')\r\nprint('two')\r\n")).text == "crlf\ntwo\n"
    assert (await calls("# nothing")).exit_code == 0
    assert (await calls("#!/usr/bin/env python3\n# -*- coding: utf-8 -*-\nprint('é')")).text == "é\n"


async def test_random_numbers_and_ids_differ_between_calls(calls: Calls) -> None:
    code = "import random, secrets, uuid, os\nprint(random.random(), uuid.uuid4(), os.urandom(4).hex())"
    done = await calls.one_after_the_other(code, code, code, preload=["random", "uuid"])
    assert len({each.stdout for each in done}) == 3
    for part in range(3):
        assert len({each.stdout.split()[part] for each in done}) == 3


@pytest.mark.parametrize(
    ("code", "exit_code", "stdout", "stderr"),
    [
        ("echo hi; echo no >&2; exit 3", 3, "hi\n", "no\n"),
        ("cat; cat /dev/stdin; echo $0 $1", 0, "inputmain.sh a\n", ""),
        ("echo out > /dev/stdout; echo err > /dev/stderr", 0, "out\n", "err\n"),
        ("sleep 100 & echo $!  > /dev/null; echo done", 0, "done\n", ""),
        ("yes | head -n 1; echo *", 0, "y\nmain.sh\n", ""),
        ("kill -9 $$", None, "", ""),
        ("nope", 127, "", "main.sh: 1: nope: not found\n"),
    ],
)
async def test_shell_programs_are_as_under_sh(
    calls: Calls, code: str, exit_code: int | None, stdout: str, stderr: str
) -> None:
    done = await calls(code, language="shell", stdin=b"input", args=["a"])
    assert (done.stderr.decode(), done.text, done.exit_code) == (stderr, stdout, exit_code)
