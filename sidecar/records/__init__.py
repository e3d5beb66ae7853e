"""Records: what memories say, read by one reader per source into one model."""
