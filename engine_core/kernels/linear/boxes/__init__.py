"""How tiles of a weight come to shared memory."""
