"""Whole evaluations, with models that follow a script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import Model, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import bash, bash_session, python, text_editor
from inspect_ai.util import sandbox

DOCS = Path(__file__).resolve().parents[3] / "docs" / "inspect.md"
MODEL = "mockllm/model"
EVAL_S = 60.0
SAMPLES = 2


def scripted(*calls: tuple[str, dict[str, object]]) -> Model:
    """A model that makes these calls of tools in every sample, one after the other, and then says done."""

    def answer(messages: list[object], *_: object) -> ModelOutput:
        made = sum(getattr(message, "role", "") == "assistant" for message in messages)
        if made < len(calls):
            name, arguments = calls[made]
            output = ModelOutput.for_tool_call(MODEL, name, arguments)
        else:
            output = ModelOutput.from_content(MODEL, "done")
        output.usage = ModelUsage()
        return output

    return get_model(MODEL, custom_outputs=answer)


@scorer(metrics=[accuracy()])
def same_file():
    """The sandbox's report.txt is the target."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=await sandbox().read_file("report.txt") == target.text)

    return score


def full_marks(log: EvalLog) -> bool:
    assert log.status == "success", log.error
    assert log.results is not None
    return log.results.scores[0].metrics["accuracy"].value == 1.0


def test_tools_of_every_kind_work_in_one_sandbox_and_the_score_is_full(tmp_path: Path) -> None:
    model = scripted(
        ("bash", {"command": "cat given/number.txt > report.txt"}),
        ("python", {"code": "print(6 * 7, file=open('report.txt', 'a'))"}),
        ("bash_session", {"action": "type_submit", "input": "cd given; export WORD=kept"}),
        ("bash_session", {"action": "type_submit", "input": "echo $WORD $(id -un) $PWD >> ../report.txt"}),
        ("text_editor", {"command": "create", "path": "/home/agent/more.txt", "file_text": "edited\n"}),
        ("bash", {"command": "cat more.txt prepared.txt >> report.txt"}),
    )
    samples = [
        Sample(
            input="Write the report.",
            target=f"{number}\n42\nkept agent /home/agent/given\nedited\nsetup as agent\n",
            files={"given/number.txt": f"{number}\n"},
            setup="echo setup as $(whoami) > prepared.txt",
        )
        for number in range(SAMPLES)
    ]
    task = Task(
        samples,
        solver=[use_tools(bash(), python(), bash_session(), text_editor()), generate()],
        scorer=same_file(),
        sandbox="cloudyard",
    )
    (log,) = eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert full_marks(log), [sample.messages for sample in log.samples or []]


def test_the_examples_of_the_documentation_work_as_written(tmp_path: Path) -> None:
    text = DOCS.read_text()
    programs = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "count_words.py").write_text(programs[0])
    (tmp_path / "cloudyard.yaml").write_text(re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S)[0])
    (command,) = re.findall(r"^inspect (eval .*rehearsal)$", text, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", "inspect_ai", *command.split()],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=EVAL_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = (tmp_path / "logs").glob("*.eval")
    assert full_marks(read_eval_log(str(log)))
    said = {}
    exec(programs[1], said)
    assert said["sandbox"].config.memory == "1GiB"
