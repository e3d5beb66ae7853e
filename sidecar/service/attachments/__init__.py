"""Sandboxes that the service looks after."""
