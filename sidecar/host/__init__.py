"""The sidecar's own machine: files, scratch space, threads, text for the terminal, and config sections."""
