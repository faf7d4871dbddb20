"""THE STEP: building what a job names, composing it with a plan, precision, totals of a step."""
