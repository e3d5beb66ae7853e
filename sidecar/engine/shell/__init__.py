"""Shell scripts for exports and restores in sandboxes without Python."""
