"""What must not leave the sandbox: private passages and credentials."""
