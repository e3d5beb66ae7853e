"""The conversation with a sandbox: deliver the program, ask, check the answer."""
