"""What the service does by itself, on a schedule."""
