"""Draws docs/pictures/balance.svg: what each of four devices holds at its peak, from benchmarks/results/balance.json.

python benchmarks/memory/balance.py && python docs/pictures/balance.py
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLOURS = {
    "parameters": "#4477aa",
    "gradients": "#66ccee",
    "sums": "#ccbb44",
    "optimizer": "#aa3377",
    "activations": "#228833",
    "temporaries": "#ee6677",
}
BAR, GAP, GROUP, HEIGHT, LEFT, TOP = 34, 8, 40, 240, 60, 50


def draw(plans: dict[str, dict[str, object]]) -> str:
    """One group of bars per plan, one bar per device, one colour per category."""
    most = max(max(plan["peak_bytes"]) for plan in plans.values())  # pyright: ignore
    parts: list[str] = []
    x = LEFT
    for name, plan in plans.items():
        parts.append(_text(x, TOP + HEIGHT + 38, f"{name} ({plan['imbalance']:.2f})"))
        for number, categories in enumerate(plan["devices"]):  # pyright: ignore
            y = float(TOP + HEIGHT)
            for category, colour in COLOURS.items():
                height = categories.get(category, 0) / most * HEIGHT
                y -= height
                parts.append(f'<rect x="{x}" y="{y:.1f}" width="{BAR}" height="{height:.1f}" fill="{colour}"/>')
            parts += [_text(x + 12, TOP + HEIGHT + 16, number), _text(x, y - 4, f"{plan['peak_bytes'][number] >> 20}")]
            x += BAR + GAP
        x += GROUP
    for place, (category, colour) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{LEFT + 110 * place}" y="10" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(LEFT + 110 * place + 18, 21, category))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{x}" height="{TOP + HEIGHT + 55}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: object) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="13">{text}</text>'


if __name__ == "__main__":
    results = json.loads((ROOT / "benchmarks/results/balance.json").read_text())
    Path(__file__).with_suffix(".svg").write_text(draw(results["plans"]))
