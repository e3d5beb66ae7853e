"""What is said over HTTP: the request bodies, and the answers that are not receipts.

Declared once, as plain dataclasses, for the engine that makes them, the service that sends them, the OpenAPI document
that describes them, the client that reads them and the command line that prints them. The docstring below a field is
its description in the OpenAPI document.
"""
