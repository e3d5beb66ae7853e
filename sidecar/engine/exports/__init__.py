"""Export: a sandbox's memory becomes a snapshot. ``steps`` is the order of the steps; the other modules are the steps."""
