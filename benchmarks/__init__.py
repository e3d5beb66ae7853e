"""What the sidecar costs: time, memory, bytes and round trips. ``python -m benchmarks`` measures and prints a table."""
