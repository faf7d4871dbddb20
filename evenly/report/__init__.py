"""Reports: from what a command measured, or a run recorded, to text and pictures; imports no engine."""
