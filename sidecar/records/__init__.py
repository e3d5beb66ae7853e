"""What memories say: one reader for each source, one model."""
