"""The documents as a site, and what a browser makes of it."""
