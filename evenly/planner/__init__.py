"""What a plan costs, predicted before it runs; never runs anything."""
