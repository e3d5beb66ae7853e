"""Attachments: the sandboxes that the service exports automatically."""
