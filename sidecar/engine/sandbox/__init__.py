"""The conversation with a sandbox: deliver the program, send a request, check the answer."""
