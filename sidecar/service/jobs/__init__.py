"""Scheduled work of the service."""
