"""Real notebooks, run by nbclient in a kernel of their own: cells that launch jobs and functions, fail, are stopped."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

JOB = """
import torch, evenly
from torch import nn

class Net(nn.Module):  # of a cell: no rank can import it
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))

def mean_square(model, batch):
    if fail and batch.shape[0]:
        raise ValueError("no such number")
    return model(batch).square().mean()

fail = False
def make_job(steps):
    return evenly.Job(
        model=Net, loss=mean_square, data=torch.arange(60.0).reshape(12, 5) / 60,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), global_batch=4, microbatch=2, steps=steps,
    )
"""


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Any]:
    """Runs cells one after another in one kernel; returns the outputs of the last."""
    made = nbformat.v4.new_notebook()
    client = NotebookClient(made, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.create_kernel_manager()
    client.km.transport, client.km.ip = "ipc", str(tmp_path / "kernel")  # type: ignore[union-attr]
    client.km.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]  # type: ignore[union-attr]

    def run(source: str) -> str:
        cell = nbformat.v4.new_code_cell(source)
        made.cells.append(cell)
        client.execute_cell(cell, len(made.cells) - 1)
        return text_of(cell)

    run.client = client  # type: ignore[attr-defined]
    with client.setup_kernel():
        yield run


def text_of(cell: Any) -> str:
    found = [one.get("text") or one.get("data", {}).get("text/plain", "") for one in cell.outputs]
    return "".join(found)


def test_a_job_of_a_cell_is_trained_with_a_line_that_is_written_over(notebook: Any) -> None:
    notebook(JOB)
    output = notebook(
        "summary = evenly.launch(make_job(30), devices=2, plan='zero3', out='runs/a')\nprint(summary.steps)"
    )
    assert re.search(r"\rstep 30/30  loss 0\.\d+", output)
    assert output.count("\n") < 6
    alone = notebook("one = evenly.launch(make_job(30), devices=1)\nprint(abs(one.loss - summary.loss) < 1e-6)")
    assert alone.endswith("True\n")
    with pytest.raises(CellExecutionError, match="it already holds a run"):
        notebook("evenly.launch(make_job(30), devices=2, out='runs/a')")
    resumed = notebook(
        "print(evenly.launch(make_job(40), devices=2, plan='ddp', out='runs/a', resume=True).first_step)"
    )
    assert resumed.endswith("31\n")


def test_the_error_of_a_rank_is_that_of_the_cell(notebook: Any) -> None:
    notebook(JOB)
    with pytest.raises(CellExecutionError) as failed:
        notebook("fail = True\nevenly.launch(make_job(3), devices=2)")
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(failed.value))
    assert "in mean_square" in text  # the rank's own traceback
    assert "ValueError: no such number" in text
    assert "elastic" not in text
    assert notebook("fail = False\nprint(evenly.launch(make_job(3), devices=2).steps)").endswith("3\n")


@pytest.mark.full
def test_a_function_of_a_cell_has_its_own_loop_and_its_prints_come_to_the_cell(notebook: Any) -> None:
    notebook(JOB)
    output = notebook(
        "def main(word):\n"
        "    with evenly.start(make_job(3)) as run:\n"
        "        losses = [run.step(batch).loss for batch in run.batches()]\n"
        "    print('trained', word, 'é')\n"
        "    return losses\n"
        "found = evenly.launch(main, 'here', devices=2)\n"
        "print(found[0] == found[1], len(found[0]))"
    )
    assert output == "trained here é\nTrue 3\n"


@pytest.mark.full
def test_an_interrupt_stops_the_run_and_not_the_kernel(notebook: Any) -> None:
    notebook(JOB)
    notebook("kept = 7")
    client = notebook.client
    cell = nbformat.v4.new_code_cell(
        "summary = evenly.launch(make_job(10**6), devices=2, out='runs/b')\n"
        "print(kept, summary.stopped, summary.steps > 0)"
    )
    client.nb.cells.append(cell)

    async def interrupted() -> None:
        running = asyncio.ensure_future(client.async_execute_cell(cell, len(client.nb.cells) - 1))
        while "step" not in text_of(cell):
            await asyncio.sleep(0.1)
        await client.km.interrupt_kernel()
        await running

    asyncio.get_event_loop_policy().get_event_loop().run_until_complete(interrupted())
    assert "7 True True" in text_of(cell)
