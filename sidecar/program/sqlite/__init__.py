"""SQLite databases: live copies, and their pages."""
