"""`evenly doctor`: prints what was found on this machine, in words or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from evenly.cli.tables import print_wrapped
from evenly.comm.doctor import examine
from evenly.launcher.environment import process_environment

INDENT = " " * 10
SIGNS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


def doctor(*, world: int, json_only: bool) -> int:
    """Examines this machine; returns 1 if something would keep a run from working, else 0."""
    findings = examine(process_environment(), world=world)
    if json_only:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            print_wrapped(f"{SIGNS[finding.verdict]:8}  {finding.name}: {finding.value}", further=INDENT)
            if finding.advice:
                print_wrapped(f"{INDENT}{finding.advice}", further="")
    return 1 if any(finding.verdict == "problem" for finding in findings) else 0
