"""SHOWING: from what a command measured or a run left to text and pictures; imports no engine."""
