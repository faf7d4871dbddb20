"""`evenly`, started by `evenly run`: the job of evenly_job.py in a loop of one's own.

EVENLY_PLAN names the plan, EVENLY_EXACT=bitwise|rounding how gradients are added over ranks; without them the package
decides.
--count cuts ragged batches by a count of samples instead of a budget of padded length."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from evenly_job import job
from recorder import Recorder

import evenly

rec = Recorder(("--count", {"action": "store_true"}))
exact = os.environ.get("EVENLY_EXACT")
plan = os.environ.get("EVENLY_PLAN", "ddp") + (f" exact={exact}" if exact else "")
work = job(rec.args.workload, rec.steps, rec.args.count, rec.args.eval, rec.micro)
# --- user code
with evenly.start(work, plan=plan) as run:
    for batch in run.batches():
        run.step(batch)
        rec.step()
    # --- end
    if rec.args.eval:
        # --- eval code
        result = run.evaluate()
        # --- end
        rec.eval(result.loss, result.samples)
    state = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in run.model.state_dict().items()}
rec.finish(state)
