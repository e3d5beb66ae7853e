"""What users can set about limits, guards, privacy and retention."""
