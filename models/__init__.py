"""The bundled demo model: its checkpoint, its exported bundle and the recipe that made it."""
