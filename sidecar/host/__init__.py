"""The sidecar's own machine: files, scratch space, threads, the terminal."""
