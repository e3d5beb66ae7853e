"""Export, inside the sandbox: find the memory and pack what changed."""
