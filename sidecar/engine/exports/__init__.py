"""Export: a sandbox's memory becomes a snapshot."""
